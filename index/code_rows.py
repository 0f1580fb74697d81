"""The codes of an index's rows, a line of whole words a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.index.layout import Layout

IntArray = npt.NDArray[np.int64]


class CodeRows:
    """Words of the rows of all KV heads; rows are written in order, and cut off by writing over them.

    Attributes:
        array: what kernels read, [n_kv_heads, room_rows, n_words] of the layout's `word_dtype`, C-order.
    """

    def __init__(self, n_kv_heads: int, layout: Layout) -> None:
        self._layout = layout
        self.array = self._room(n_kv_heads, 0)

    @property
    def nbytes(self) -> int:
        """Bytes held, room for more rows included."""
        return int(self.array.nbytes)

    @property
    def bytes_per_key(self) -> float:
        """Bytes that one key of one KV head takes."""
        return float(self._layout.n_words * np.dtype(self._layout.word_dtype).itemsize)

    @property
    def room_rows(self) -> int:
        """Rows that there is room for."""
        return int(self.array.shape[1])

    def write(self, start: int, words: npt.NDArray[Any]) -> None:
        """Write words [n_kv_heads, n, n_words] as rows `start` and on; room doubles, so a row is copied O(1) times."""
        stop = start + words.shape[1]
        if stop > self.room_rows:
            grown = self._room(len(self.array), max(stop, 2 * self.room_rows))
            used = self._lines(start)
            grown[:, :used] = self.array[:, :used]
            self.array = grown
        self._put(start, words)

    def words(self, n_rows: int) -> npt.NDArray[Any]:
        """Return the words of the first n_rows rows, [n_kv_heads, n_rows, n_words]; not to be written to."""
        return self.array[:, :n_rows]

    def at(self, heads: int | slice, rows: IntArray) -> npt.NDArray[Any]:
        """Return the words of rows int64 [n]: [n, n_words] of one KV head, [.., n, n_words] of several."""
        found: npt.NDArray[Any] = self.array[heads][..., rows, :]
        return found

    def copy(self, n_rows: int) -> CodeRows:
        """Return an independent copy of the first n_rows rows. O(n_rows)."""
        twin = object.__new__(type(self))
        twin._layout = self._layout
        twin.array = self.array[:, : self._lines(n_rows)].copy()
        return twin

    def _room(self, n_kv_heads: int, n_rows: int) -> npt.NDArray[Any]:
        return np.empty((n_kv_heads, n_rows, self._layout.n_words), self._layout.word_dtype)

    def _lines(self, n_rows: int) -> int:
        """Entries of the array's second axis that n_rows rows take."""
        return n_rows

    def _put(self, start: int, words: npt.NDArray[Any]) -> None:
        self.array[:, start : start + words.shape[1]] = words
