"""The exact index: it keeps no keys, it reads them where they are."""

from __future__ import annotations

from typing import ClassVar

from kvstore.errors import InvalidQueryError, SchemaMismatchError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.checks import checked_float, checked_positions, checked_view
from kvstore.index.flat_kernels import flat_scan, scan_width
from kvstore.index.rows import RowView
from kvstore.index.scanned import ScannedIndex
from kvstore.index.threads import run_parallel
from kvstore.index.workspace import Workspace


class FlatIndex(ScannedIndex):
    """Exact inner products over the rows of the `RowView` that each search brings along.

    It only counts rows: memory O(1), search O(n * head_dim) a query head.

    >>> import numpy as np
    >>> keys = np.eye(4, dtype=np.float32)[None]            # [n_kv_heads=1, n=4, head_dim=4]
    >>> index = FlatIndex(1, 4)
    >>> index.add(keys)
    >>> found = index.search(keys[:, 2:3] * 3, 1, RowView.of(keys), scale=0.5)
    >>> found.rows.tolist()
    [[2]]
    """

    kind: ClassVar[str] = "flat"
    exact: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = True

    def __init__(
        self, n_kv_heads: int, head_dim: int, *, first_row: int = 0, workspace: Workspace | None = None
    ) -> None:
        super().__init__(n_kv_heads, head_dim, first_row=first_row, workspace=workspace)
        self._n_rows = 0

    @classmethod
    def over(cls, view: RowView, start: int, stop: int, *, workspace: Workspace | None = None) -> FlatIndex:
        """Return an index of the rows [start, stop) of a table, without reading them.

        The keys are trusted to be finite. Raises `SchemaMismatchError` when the view has fewer rows.
        """
        if not 0 <= start <= stop <= view.n_rows:
            raise SchemaMismatchError(f"the view holds rows [0, {view.n_rows}), not [{start}, {stop})")
        index = cls(view.n_kv_heads, view.head_dim, first_row=start, workspace=workspace)
        index._n_rows = stop - start
        return index

    @property
    def n_rows(self) -> int:
        """Number of rows covered."""
        return self._n_rows

    @property
    def trained(self) -> bool:
        """Always true: there is nothing to train."""
        return True

    @property
    def code_bytes_per_key(self) -> float:
        """Zero: keys are not copied."""
        return 0.0

    @property
    def nbytes(self) -> int:
        """Zero: keys are not copied."""
        return 0

    def train(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Check the keys and forget all rows; see `Index.train`."""
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        if keys.shape[1] == 0:
            raise ValueError("training needs at least one row")
        checked_positions(positions, keys.shape[1], 0)
        self._n_rows = 0

    def add(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Count the rows in; their keys are checked, not kept. See `Index.add`."""
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        checked_positions(positions, keys.shape[1], self.stop_row)
        self._n_rows += keys.shape[1]

    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on."""
        if not self.first_row <= stop_row <= self.stop_row:
            raise InvalidQueryError(
                f"cannot truncate to row {stop_row}: covered are [{self.first_row}, {self.stop_row})"
            )
        self._n_rows = stop_row - self.first_row

    def clone(self) -> FlatIndex:
        """Return an independent index over the same rows."""
        twin = FlatIndex(self.n_kv_heads, self.head_dim, first_row=self.first_row, workspace=self._workspace)
        twin._n_rows = self._n_rows
        return twin

    def _score_ns(self, group: int) -> float:
        return 0.15 * self.head_dim * group

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        view = checked_view(view, self.n_kv_heads, self.head_dim, stop)
        kernel = flat_scan(self.head_dim, scan_width(q.shape[1]), view.dtype_code)
        strides = (view.block_tokens, view.head_stride_bytes, view.row_stride_bytes)
        for low, high in view.parts(start, stop):
            run_parallel(kernel, view.block_addresses, *strides, low, high, low - start, q, out)

    def _check(self) -> None:
        assert self._n_rows >= 0
