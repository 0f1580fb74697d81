"""What indexes have in common that score every row: checks, buffers, the shape of an answer."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from kvstore.errors import SchemaMismatchError
from kvstore.index.base import Candidates, FloatArray, Index
from kvstore.index.checks import checked_float, checked_range, checked_search
from kvstore.index.rank import rank_heads
from kvstore.index.rows import RowView
from kvstore.index.threads import begin_work, end_work, run_parallel
from kvstore.index.workspace import Workspace, default_workspace

RANK_NS = 1.0
"""Rough nanoseconds to rank a score; only whether to wake threads depends on it."""


class ScannedIndex(Index):
    """An index that scores all rows of a range, then selects; subclasses say how rows are scored."""

    def __init__(
        self, n_kv_heads: int, head_dim: int, *, first_row: int = 0, workspace: Workspace | None = None
    ) -> None:
        super().__init__(n_kv_heads, head_dim, first_row=first_row)
        self._workspace = workspace if workspace is not None else default_workspace()

    def scores(
        self, q: FloatArray, view: RowView | None = None, *, start: int | None = None, stop: int | None = None
    ) -> FloatArray:
        """Return q . key as the index sees it, [n_kv_heads, group, stop - start]; see `Index.scores`."""
        q = self._checked_query(q)
        low, high = checked_range(start, stop, self.first_row, self.stop_row)
        out = np.empty((self.n_kv_heads, q.shape[1], high - low), np.float32)
        if high > low:
            self._scan(q, view, low, high, out)
        return out

    def search(
        self,
        q: FloatArray,
        k: int,
        view: RowView | None = None,
        *,
        scale: float,
        reduce: str = "sum_softmax",
        start: int | None = None,
        stop: int | None = None,
        out: Candidates | None = None,
    ) -> Candidates:
        """Return the k rows of each KV head with the largest group scores; see `Index.search`.

        Raises `SchemaMismatchError` or `NonFiniteError` for a wrong q or out, `InvalidQueryError` for k, scale,
        reduce or a range out of bounds.
        """
        reduction = checked_search(k, scale, reduce)
        q = self._checked_query(q)
        low, high = checked_range(start, stop, self.first_row, self.stop_row)
        heads, group, _ = q.shape
        k = min(k, high - low)
        found = Candidates.room(heads, group, k) if out is None else _checked_room(out, heads, group, k)
        self.search_checked(q, view, scale, reduction, low, high, found)
        return found

    def search_checked(
        self, q: FloatArray, view: RowView | None, scale: float, reduction: int, low: int, high: int, out: Candidates
    ) -> None:
        """`search` for who has checked everything: rows [low, high), as many as `out` has room for, at most all.

        q: float32 [n_kv_heads, group, head_dim], C-order, finite; reduction: a code of `REDUCTIONS`.
        """
        heads, group, _ = q.shape
        k = out.rows.shape[1]
        if k == 0:
            out.log_norm.fill(-np.inf)
            return
        scores, places = self._workspace.take(heads, group, high - low)
        before = begin_work((self._score_ns(group) + RANK_NS * group) * heads * (high - low))
        try:
            self._scan(q, view, low, high, scores)
            run_parallel(
                rank_heads, scores, float(scale), reduction, k, low, places, out.rows, out.scores, out.log_norm
            )
        finally:
            end_work(before)

    def _checked_query(self, q: FloatArray) -> FloatArray:
        q = checked_float(q, self.n_kv_heads, self.head_dim, "queries")
        if q.shape[1] == 0:
            raise ValueError("queries must hold at least one query head a KV head")
        return q

    @abstractmethod
    def _score_ns(self, group: int) -> float:
        """Rough nanoseconds to score a row of one KV head; only whether to wake threads depends on it."""

    @abstractmethod
    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        """Write the scores of rows [start, stop), start < stop, to out [n_kv_heads, >= group, >= stop - start]."""


def _checked_room(out: Candidates, heads: int, group: int, k: int) -> Candidates:
    """Return the caller's arrays, or raise `SchemaMismatchError` unless an answer fits them exactly."""
    for name, array, shape, dtype in (
        ("rows", out.rows, (heads, k), np.int64),
        ("scores", out.scores, (heads, k), np.float32),
        ("log_norm", out.log_norm, (heads, group), np.float32),
    ):
        if array.shape != shape or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.writeable):
            raise SchemaMismatchError(
                f"out.{name} must be a writable C-order {np.dtype(dtype)} {list(shape)}, not {array.dtype} "
                f"{list(array.shape)}; see Candidates.room"
            )
    return out
