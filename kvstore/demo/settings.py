"""What the demo is asked to run."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.budget import Budget, check_budget
from kvstore.errors import ConfigError, InvalidQueryError

MIN_TOKENS = 300


@dataclass(frozen=True)
class DemoSettings:
    """One run of the demo; bad values raise `InvalidQueryError` or `ConfigError`.

    Attributes:
        n_tokens: of context, question and answer.
        budgets: one run of the store each.
        depth: where in the text the fact stands, 0 (beginning) to 1 (end).
        seed: chooses the hidden number.
    """

    n_tokens: int = 4096
    budgets: tuple[Budget, ...] = (0.2, 0.1)
    depth: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_tokens < MIN_TOKENS:
            raise InvalidQueryError(f"a context of {self.n_tokens} tokens is too short; use {MIN_TOKENS} or more")
        if not 0.0 <= self.depth <= 1.0:
            raise InvalidQueryError(f"depth must be between 0 and 1, not {self.depth}")
        if not self.budgets:
            raise ConfigError("give at least one budget")
        for budget in self.budgets:
            check_budget(budget)
