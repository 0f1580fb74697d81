"""Positions of rows, kept as runs of consecutive numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Runs:
    """Maps row offsets 0, 1, ... to RoPE positions; almost always one run, whatever the length.

    Attributes:
        offsets: int64 [n_runs], first row offset of each run, ascending.
        positions: int64 [n_runs], position of that row.
        n_rows: rows mapped.

    >>> runs = Runs()
    >>> runs.append(np.array([5, 6, 7, 100, 101]))
    >>> runs.offsets.tolist(), runs.positions.tolist()
    ([0, 3], [5, 100])
    >>> runs.at(np.array([0, 4])).tolist()
    [5, 101]
    """

    __slots__ = ("n_rows", "offsets", "positions")

    def __init__(self) -> None:
        self.offsets: IntArray = np.empty(0, np.int64)
        self.positions: IntArray = np.empty(0, np.int64)
        self.n_rows = 0

    def append(self, positions: IntArray) -> None:
        """Add rows with these positions, int64 [n]. O(n)."""
        n = len(positions)
        if n == 0:
            return
        starts = np.flatnonzero(np.diff(positions) != 1) + 1 if n > 1 else np.empty(0, np.int64)
        if not self._continues(int(positions[0])):
            starts = np.concatenate([[0], starts])
        if len(starts):
            self.offsets = np.concatenate([self.offsets, starts + self.n_rows])
            self.positions = np.concatenate([self.positions, positions[starts]])
        self.n_rows += n

    def truncate(self, n_rows: int) -> None:
        """Keep the first n_rows rows."""
        keep = int(np.searchsorted(self.offsets, n_rows, side="left"))
        self.offsets, self.positions = self.offsets[:keep], self.positions[:keep]
        self.n_rows = n_rows

    def at(self, offsets: IntArray) -> IntArray:
        """Return the positions of row offsets, int64 [n]; each must be below n_rows."""
        run = np.searchsorted(self.offsets, offsets, side="right") - 1
        result: IntArray = self.positions[run] + (offsets - self.offsets[run])
        return result

    def clone(self) -> Runs:
        """Return an independent copy; arrays are never changed in place, so they can be shared."""
        twin = Runs()
        twin.offsets, twin.positions, twin.n_rows = self.offsets, self.positions, self.n_rows
        return twin

    def _continues(self, position: int) -> bool:
        if self.n_rows == 0:
            return False
        return position == int(self.positions[-1]) + self.n_rows - int(self.offsets[-1])
