"""RoPE positions of a sequence's rows, kept as runs of consecutive numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Positions:
    """The position of each row. Rows continue the last run unless they say otherwise, so this is O(runs) big."""

    __slots__ = ("_first", "_starts", "_values", "n_rows")

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._starts: list[int] = []  # first row of each run
        self._values: list[int] = []  # its position
        self.n_rows = 0

    def append(self, n: int, positions: npt.NDArray[np.int64] | None = None) -> None:
        """Add n rows; without positions they follow the last row's (row 0 has the position `first`)."""
        if positions is None:
            if not self._starts and n:
                self._start_run(0, self._first)
        else:
            breaks = np.flatnonzero(np.diff(positions) != 1) + 1
            for at in (0, *breaks.tolist()) if n else ():
                self._start_run(self.n_rows + at, int(positions[at]))
        self.n_rows += n

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions of the rows [start, stop), int64 [stop - start]."""
        rows = np.arange(start, stop)
        run = np.searchsorted(self._starts, rows, side="right") - 1
        return np.asarray(self._values, np.int64)[run] + rows - np.asarray(self._starts, np.int64)[run]

    def truncate(self, n_rows: int) -> None:
        """Forget the rows from n_rows on."""
        while self._starts and self._starts[-1] >= n_rows:
            self._starts.pop()
            self._values.pop()
        self.n_rows = n_rows

    def copy(self) -> Positions:
        """Return an independent copy."""
        twin = Positions(self._first)
        twin._starts, twin._values, twin.n_rows = self._starts[:], self._values[:], self.n_rows
        return twin

    def _start_run(self, row: int, position: int) -> None:
        if self._starts and position - self._values[-1] == row - self._starts[-1]:
            return  # goes on where the last run is
        self._starts.append(row)
        self._values.append(position)
