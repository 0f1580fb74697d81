"""What indexes have in common that keep codes of one size for every row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvstore.errors import IndexNotTrainedError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.checks import checked_cut, checked_float, checked_positions
from kvstore.index.scanned import ScannedIndex
from kvstore.index.workspace import Workspace


class CodedIndex(ScannedIndex):
    """An index whose rows are lines of a few growing arrays; subclasses say what is learned and what is written.

    Args:
        parts: width and dtype of each array of codes, which is then [n_kv_heads, >= n_lines, width], C-order.
        rows_per_line: rows that share a line; n_lines is n_rows over it, rounded up.
        first_row: row id of the first row.
    """

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        parts: Sequence[tuple[int, npt.DTypeLike]],
        rows_per_line: int = 1,
        first_row: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__(n_kv_heads, head_dim, first_row=first_row, workspace=workspace)
        self._n_rows, self._rows_per_line = 0, rows_per_line
        self._parts: list[npt.NDArray[Any]] = [np.empty((n_kv_heads, 0, width), dtype) for width, dtype in parts]

    @property
    def n_rows(self) -> int:
        """Number of rows covered."""
        return self._n_rows

    @property
    def trained(self) -> bool:
        """Whether `train` was called."""
        return len(self._learned()) > 0

    @property
    def code_bytes_per_key(self) -> float:
        """Bytes of codes that one key of one KV head takes."""
        return float(sum(part.shape[2] * part.itemsize for part in self._parts)) / self._rows_per_line

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, allocated room included, and what `train` learned."""
        return sum(int(array.nbytes) for array in (*self._parts, *self._learned()))

    def train(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Learn from keys as stored, float32 [n_kv_heads, n, head_dim], and forget all rows; see `Index.train`."""
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        if keys.shape[1] == 0:
            raise ValueError("training needs at least one row")
        checked_positions(positions, keys.shape[1], 0)
        self._learn(keys)
        self._n_rows = 0
        self._parts = [np.empty((self.n_kv_heads, 0, part.shape[2]), part.dtype) for part in self._parts]

    def add(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Code the keys and append them as rows; see `Index.add`. Raises `IndexNotTrainedError` before `train`."""
        if not self.trained:
            raise IndexNotTrainedError(f"an index of kind {self.kind!r} learns from keys first; call train(keys)")
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        n = keys.shape[1]
        checked_positions(positions, n, self.stop_row)
        if n:
            self._reserve(self._n_rows + n)
            self._encode(keys, self._n_rows)
            self._n_rows += n

    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on; what was learned stays."""
        self._n_rows = checked_cut(stop_row, self.first_row, self.stop_row) - self.first_row

    def clone(self) -> Self:
        """Return an independent index with the same rows: codes are copied, what was learned is shared. O(n)."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._parts = [part[:, : self._n_lines].copy() for part in self._parts]
        return twin

    @property
    def _n_lines(self) -> int:
        return -(-self._n_rows // self._rows_per_line)

    def _reserve(self, n_rows: int) -> None:
        """Make room for n_rows, doubling, so that rows added one at a time are copied O(1) times each."""
        room, needed = self._parts[0].shape[1], -(-n_rows // self._rows_per_line)
        if needed > room:
            for i, part in enumerate(self._parts):
                grown = np.empty((self.n_kv_heads, max(needed, 2 * room), part.shape[2]), part.dtype)
                grown[:, : self._n_lines] = part[:, : self._n_lines]
                self._parts[i] = grown

    def _check(self) -> None:
        assert all(part.shape[1] >= self._n_lines for part in self._parts)
        assert self.trained or self._n_rows == 0
        assert all(np.isfinite(array).all() for array in self._learned())

    @abstractmethod
    def _learned(self) -> tuple[npt.NDArray[Any], ...]:
        """Arrays that `train` made and nobody changes; none before."""

    @abstractmethod
    def _learn(self, keys: FloatArray) -> None:
        """Learn from checked keys, float32 [n_kv_heads, n >= 1, head_dim]."""

    @abstractmethod
    def _encode(self, keys: FloatArray, start: int) -> None:
        """Write the codes of checked keys to the parts, from row offset `start` on."""
