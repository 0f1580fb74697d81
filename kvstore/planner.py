"""Which rows a query reads, and how it finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.budget import Budget, head_budgets
from kvstore.config import StoreConfig

DENSE, FLAT, INDEX = "dense", "flat", "index"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one attention query of one table will do.

    Attributes:
        method: `"dense"` (all rows), `"flat"` (exact scan of the middle) or `"index"`.
        first: first row that is not padding.
        sinks_stop: the sinks are the rows [first, sinks_stop).
        tail_start: the tail is [tail_start, n_rows): the window, and rows that wait to be encoded.
        n_rows: rows of the table.
        n_selected: rows to choose from the middle [sinks_stop, tail_start), of the KV head that may choose most.
        n_candidates: rows that the index proposes for an exact rerank (n_selected: no rerank).
        reason: why this method.
        by_head: (n_candidates, n_selected) of each KV head, where they may not choose equally many; else empty.
    """

    method: str
    first: int
    sinks_stop: int
    tail_start: int
    n_rows: int
    n_selected: int
    n_candidates: int
    reason: str
    by_head: tuple[tuple[int, int], ...] = ()

    @property
    def n_middle(self) -> int:
        """Rows between sinks and tail."""
        return self.tail_start - self.sinks_stop

    @property
    def n_attended(self) -> int:
        """Rows that attention reads, the mean over KV heads."""
        chosen = [n_selected for _, n_selected in self.by_head] or [self.n_selected]
        return self.n_rows - self.first - self.n_middle + round(sum(chosen) / len(chosen))


class Planner:
    """Makes the plans of a store and keeps them for a while: the layers of a step mostly plan the same."""

    _KEPT = 1024  # plans: a step's, of as many sequences of different lengths

    def __init__(self, config: StoreConfig, n_heads: int) -> None:
        self._config = config
        self._n_heads = n_heads
        self._kept: dict[Any, Plan] = {}

    def plan(
        self,
        budget: Budget,
        first: int,
        n_rows: int,
        covered: tuple[int, int] | None,
        layer: int,
        *,
        building: bool = False,
    ) -> Plan:
        """Plan one query, see `plan_attention`; a budget that is a rule is asked anew each time."""
        if callable(budget):
            return self._new(budget, first, n_rows, covered, layer, building)
        key = (budget, type(budget), first, n_rows, covered, building)  # 1 row and 1.0 of them are equal
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= self._KEPT:
                self._kept.clear()
            found = self._kept[key] = self._new(budget, first, n_rows, covered, layer, building)
        return found

    def _new(
        self, budget: Budget, first: int, n_rows: int, covered: tuple[int, int] | None, layer: int, building: bool
    ) -> Plan:
        rows = first, n_rows, covered
        return plan_attention(self._config, budget, *rows, layer, self._n_heads, building=building)


def plan_attention(
    config: StoreConfig,
    budget: Budget,
    first: int,
    n_rows: int,
    covered: tuple[int, int] | None,
    layer: int = 0,
    n_heads: int = 1,
    *,
    building: bool = False,
) -> Plan:
    """Plan one query over the rows [first, n_rows); `covered` are the rows an index holds, or None.

    `building` says that it is not there yet, but on its way.
    O(1), or O(n_heads) for a budget that is a rule. Raises `ConfigError` for a rule that returns no allowance.
    """
    length = n_rows - first
    if budget is None:
        return _dense(first, n_rows, "the budget is all rows")
    if length <= config.dense_rows:
        return _dense(first, n_rows, f"{length} rows, dense up to {config.dense_rows}")
    if covered is not None:
        method, (sinks_stop, tail_start), reason = INDEX, covered, "covered by the index"
    else:
        method, reason = FLAT, "index is being built" if building else "no index"
        sinks_stop = min(first + config.sinks, n_rows)
        tail_start = max(sinks_stop, n_rows - config.window)
    n_middle = tail_start - sinks_stop
    kept = length - n_middle
    allowed = head_budgets(budget, layer, n_heads, length)
    selected = tuple(min(n_middle, max(rows - kept, config.min_selected)) for rows in allowed)
    if min(selected) >= n_middle:
        return _dense(first, n_rows, "the budget covers all rows")
    over_fetch = config.index.over_fetch if method == INDEX else 1.0
    by_head = tuple((min(n_middle, round(over_fetch * n)), n) for n in selected)
    n_candidates, n_selected = max(by_head)
    uneven = len(set(selected)) > 1
    return Plan(
        method, first, sinks_stop, tail_start, n_rows, n_selected, n_candidates, reason, by_head if uneven else ()
    )


def _dense(first: int, n_rows: int, reason: str) -> Plan:
    return Plan(DENSE, first, n_rows, n_rows, n_rows, 0, 0, reason)
