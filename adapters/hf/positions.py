"""RoPE positions of the rows of a batch, where they do not simply go on."""

from __future__ import annotations

from typing import Any

import torch


class StepPositions:
    """Compares the model's `position_ids` with the positions that the store would give the rows by itself.

    A store counts on from the row before, so most steps need to say nothing.
    """

    __slots__ = ("_after", "_next")

    def __init__(self) -> None:
        self._next: list[int] | None = None  # a batch row's next position; None when not known
        self._after: list[int] | None = None  # the same once the open step has committed

    def begin(self, kwargs: dict[str, Any] | None, n_batch: int, n_new: int) -> list[torch.Tensor] | None:
        """Return the positions of a step's rows, int64 [n_new] a batch row, or None where all go on by themselves."""
        ids = kwargs.get("position_ids") if kwargs else None
        if ids is None or ids.dim() != 2 or ids.shape[1] != n_new:
            self._after = None
            return None
        firsts, lasts = ids[:, 0].tolist(), ids[:, -1].tolist()
        if len(firsts) == 1:
            firsts, lasts = firsts * n_batch, lasts * n_batch
        self._after = [last + 1 for last in lasts]
        if firsts == self._next and _counts_up(ids):
            return None
        return list(ids.to("cpu", torch.int64).clamp(min=0).expand(n_batch, n_new))  # padding may be below 0

    def commit(self) -> None:
        """The step's rows are in the store."""
        self._next = self._after

    def forget(self) -> None:
        """The rows have changed otherwise: the next step says its positions."""
        self._next = None

    def start(self, n_batch: int) -> None:
        """The rows are gone: the next row has position 0."""
        self._next = [0] * n_batch

    def select(self, indices: list[int]) -> None:
        """The batch rows are now those with these old numbers."""
        if self._next is not None:
            self._next = [self._next[i] for i in indices]

    def copy(self) -> StepPositions:
        """Return an independent copy."""
        twin = StepPositions()
        twin._next = self._next and self._next[:]
        return twin


def _counts_up(ids: torch.Tensor) -> bool:
    return ids.shape[1] == 1 or bool((ids.diff(dim=1) == 1).all())
