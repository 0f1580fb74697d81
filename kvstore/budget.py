"""Budgets: how many rows a query may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvstore.errors import ConfigError

Allowance: TypeAlias = float | int | None
"""A share of the rows (float in (0, 1]), a number of rows (int), or None for all of them."""

BudgetRule: TypeAlias = Callable[[int, int, int], Allowance]
"""`rule(layer, head, n_rows)`: the allowance of a KV head of a layer when the sequence has n_rows rows."""

Budget: TypeAlias = Allowance | BudgetRule


def check_budget(budget: Budget) -> None:
    """Raise `ConfigError` unless budget is None, a share in (0, 1], a positive number of rows, or a rule."""
    if budget is None or callable(budget):
        return
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ConfigError(f"budget must be a share (float), a number of rows (int), None or a function, not {budget!r}")
    if isinstance(budget, int) and budget < 1:
        raise ConfigError(f"a budget in rows must be at least 1, not {budget}")
    if isinstance(budget, float) and not 0.0 < budget <= 1.0:
        raise ConfigError(f"a budget as a share must be in (0, 1], not {budget}; rows are given as an int")


def budget_rows(allowance: Allowance, n_rows: int) -> int:
    """Rows that an allowance gives at a length of n_rows."""
    if allowance is None:
        return n_rows
    if isinstance(allowance, int):
        return min(allowance, n_rows)
    return min(n_rows, max(1, round(allowance * n_rows)))


def head_budgets(budget: Budget, layer: int, n_heads: int, n_rows: int) -> tuple[int, ...]:
    """Rows that each KV head of a layer may read at a length of n_rows: one number when all heads may read as many.

    Raises `ConfigError` when a rule returns what is no allowance.
    """
    if not callable(budget):
        return (budget_rows(budget, n_rows),)
    found = []
    for head in range(n_heads):
        allowance = budget(layer, head, n_rows)
        if callable(allowance):
            raise ConfigError(
                f"the budget's rule returned {allowance!r} for layer {layer}, head {head}; return a number"
            )
        check_budget(allowance)
        found.append(budget_rows(allowance, n_rows))
    return tuple(found) if len(set(found)) > 1 else (found[0],)
