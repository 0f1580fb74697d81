"""The codes of an index's rows, 12 bits a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.index.code_rows import CodeRows, IntArray
from kvstore.index.packed_kernels import BLOCK_ROWS, HALF_ROWS, LINE_BYTES, write_words


class PackedRows(CodeRows):
    """Words of at most 12 bits, in 12 bits each, as `packed_kernels` says; given and returned as uint16.

    Attributes:
        array: what kernels read, uint8 [n_kv_heads, n_blocks, n_words, LINE_BYTES], C-order; a block is 128 rows.
    """

    @property
    def bytes_per_key(self) -> float:
        """Bytes that one key of one KV head takes."""
        return self._layout.n_words * LINE_BYTES / BLOCK_ROWS

    @property
    def room_rows(self) -> int:
        """Rows that there is room for."""
        return int(self.array.shape[1]) * BLOCK_ROWS

    def words(self, n_rows: int) -> npt.NDArray[Any]:
        """Return the words of the first n_rows rows, uint16 [n_kv_heads, n_rows, n_words]; a copy, O(n_rows)."""
        blocks = self.array[:, : self._lines(n_rows)]
        low, rest = blocks[..., :BLOCK_ROWS].astype(np.uint16), blocks[..., BLOCK_ROWS:]
        low |= np.concatenate([rest & 15, rest >> 4], -1).astype(np.uint16) << 8
        heads, n_blocks, n_words, _ = low.shape
        return np.swapaxes(low, 2, 3).reshape(heads, n_blocks * BLOCK_ROWS, n_words)[:, :n_rows]

    def at(self, heads: int | slice, rows: IntArray) -> npt.NDArray[Any]:
        """Return the words of rows int64 [n]: uint16 [n, n_words] of one KV head, [.., n, n_words] of several."""
        block, place = np.divmod(rows, BLOCK_ROWS)
        half, shared = np.divmod(place, HALF_ROWS)
        blocks = self.array[heads]
        low = blocks[..., block, :, place].astype(np.uint16)  # NumPy puts the axis of rows first
        rest = blocks[..., block, :, BLOCK_ROWS + shared].astype(np.uint16)
        shifts = (4 * half).astype(np.uint16).reshape(-1, *[1] * (rest.ndim - 1))
        return np.moveaxis(low | (rest >> shifts & 15) << 8, 0, -2)

    def _room(self, n_kv_heads: int, n_rows: int) -> npt.NDArray[Any]:
        return np.zeros((n_kv_heads, self._lines(n_rows), self._layout.n_words, LINE_BYTES), np.uint8)

    def _lines(self, n_rows: int) -> int:
        return -(-n_rows // BLOCK_ROWS)

    def _put(self, start: int, words: npt.NDArray[Any]) -> None:
        dense = np.require(words, requirements=["C", "W"])  # for each other kind of array a kernel would be compiled
        write_words(dense, start, self.array)
