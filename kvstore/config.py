"""Settings of a store; frozen, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError

MIB = 1 << 20
Budget = float | int | None
REDUCTIONS = ("sum_softmax", "max", "mean")


@dataclass(frozen=True)
class IndexConfig:
    """How the keys of a table are indexed.

    Attributes:
        kind: a name of `kvstore.index.registry`; `"flat"` means that every query scans all rows exactly.
        options: settings of that kind, for example `{"m": 2, "bits": 6}` for `"pq"`.
        min_rows: rows between sinks and window from which an index is built; shorter tables are scanned exactly.
        over_fetch: candidates taken from the index for each row wanted; they are scored again with the exact keys
            and the best are kept (1 keeps the index's own choice).
        append_rows: rows that leave the window wait, scanned exactly, until this many are encoded in one go.
        seed: of K-Means; the same seed and rows give the same index.
    """

    kind: str = "pq"
    options: dict[str, Any] = field(default_factory=dict)
    min_rows: int = 256
    over_fetch: float = 2.0
    append_rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.min_rows < 1 or self.append_rows < 1:
            raise ConfigError(
                f"min_rows and append_rows must be at least 1, not {self.min_rows} and {self.append_rows}"
            )
        if not 1 <= self.over_fetch < float("inf"):
            raise ConfigError(f"over_fetch must be at least 1, not {self.over_fetch}")


@dataclass(frozen=True)
class StoreConfig:
    """How a store keeps and queries its rows.

    Attributes:
        sinks: first rows of a sequence, always attended exactly and never indexed.
        window: last rows, the same.
        budget: rows that `attend` reads, sinks and window included: a share of the rows (float in (0, 1]), a
            number of rows (int), or None for all of them (dense attention).
        min_selected: rows chosen from the middle however small the budget is.
        dense_rows: sequences up to this long are attended densely: there selection costs more than it saves.
        reduce: how the query heads of one KV head agree on a row: "sum_softmax", "max" or "mean".
        index: settings of the index.
        arena_bytes: size of one allocation of the heap.
        heap_bytes: limit of the heap (0: none).
    """

    sinks: int = 4
    window: int = 64
    budget: Budget = 0.1
    min_selected: int = 32
    dense_rows: int = 512
    reduce: str = "sum_softmax"
    index: IndexConfig = field(default_factory=IndexConfig)
    arena_bytes: int = 32 * MIB
    heap_bytes: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise ConfigError(f"sinks must be >= 0 and window >= 1, not {self.sinks} and {self.window}")
        if self.reduce not in REDUCTIONS:
            raise ConfigError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {self.reduce!r}")
        if self.min_selected < 1:
            raise ConfigError(f"min_selected must be at least 1, not {self.min_selected}")
        if self.dense_rows < 0:
            raise ConfigError(f"dense_rows must not be negative, got {self.dense_rows}")
        if self.arena_bytes < 1 or self.heap_bytes < 0:
            raise ConfigError("arena_bytes must be positive and heap_bytes not negative")
        check_budget(self.budget)


def check_budget(budget: Budget) -> None:
    """Raise `ConfigError` unless budget is None, a share in (0, 1] or a positive number of rows."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ConfigError(f"budget must be a share (float), a number of rows (int) or None, not {budget!r}")
    if isinstance(budget, int) and budget < 1:
        raise ConfigError(f"a budget in rows must be at least 1, not {budget}")
    if isinstance(budget, float) and not 0.0 < budget <= 1.0:
        raise ConfigError(f"a budget as a share must be in (0, 1], not {budget}; rows are given as an int")


def budget_rows(budget: Budget, n_rows: int) -> int:
    """Rows that a budget allows at a length of n_rows."""
    if budget is None:
        return n_rows
    if isinstance(budget, int):
        return min(budget, n_rows)
    return min(n_rows, max(1, round(budget * n_rows)))
