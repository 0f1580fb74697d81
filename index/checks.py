"""Checks at the border of an index: what passes here, kernels may trust."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidQueryError, NonFiniteError, SchemaMismatchError
from kvstore.index.rank import all_finite
from kvstore.index.reduce import REDUCTIONS
from kvstore.index.rows import RowView

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def checked_float(array: Any, n_heads: int, last: int, what: str) -> FloatArray:
    """Return a C-order float32 [n_heads, any, last], or raise `SchemaMismatchError` or `NonFiniteError`."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise SchemaMismatchError(f"{what} must be a float32 array, not {found}; convert with astype")
    if array.ndim != 3 or array.shape[0] != n_heads or array.shape[2] != last:
        raise SchemaMismatchError(f"{what} must have shape [{n_heads}, n, {last}], not {list(array.shape)}")
    contiguous: FloatArray = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if not all_finite(contiguous):
        raise NonFiniteError(f"{what} hold NaN or infinity; find out where the model makes them")
    return contiguous


def checked_positions(positions: Any, n: int, first: int) -> IntArray:
    """Return int64 [n] of RoPE positions: the given ones, or first, first + 1, ..."""
    if positions is None:
        return np.arange(first, first + n, dtype=np.int64)
    array = np.asarray(positions)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise SchemaMismatchError(f"positions must be {n} integers, not {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array, np.int64)


def checked_range(start: int | None, stop: int | None, first_row: int, stop_row: int) -> tuple[int, int]:
    """Return the row range, all rows by default, or raise `InvalidQueryError` when it leaves the coverage."""
    low = first_row if start is None else start
    high = stop_row if stop is None else stop
    if not first_row <= low <= high <= stop_row:
        raise InvalidQueryError(f"rows [{low}, {high}) leave the rows covered, [{first_row}, {stop_row})")
    return low, high


def checked_cut(stop_row: int, first_row: int, covered_stop: int) -> int:
    """Return the row to truncate to, or raise `InvalidQueryError` when it leaves the coverage."""
    if not first_row <= stop_row <= covered_stop:
        raise InvalidQueryError(f"cannot truncate to row {stop_row}: covered are [{first_row}, {covered_stop})")
    return stop_row


def checked_search(k: int, scale: float, reduce: str) -> int:
    """Return the code of the reduction, or raise `InvalidQueryError`."""
    if k <= 0:
        raise InvalidQueryError(f"k must be positive, not {k}")
    if not 0.0 < scale < float("inf"):
        raise InvalidQueryError(f"scale must be positive and finite, not {scale}; usual is head_dim ** -0.5")
    code = REDUCTIONS.get(reduce)
    if code is None:
        raise InvalidQueryError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    return code


def checked_view(view: RowView | None, n_heads: int, head_dim: int, stop: int) -> RowView:
    """Return the view, or raise `SchemaMismatchError` when it is not one of this table up to row `stop`."""
    if view is None:
        raise SchemaMismatchError("this index reads keys at search time: pass view=RowView(...)")
    if view.n_kv_heads != n_heads or view.head_dim != head_dim:
        raise SchemaMismatchError(
            f"the view has {view.n_kv_heads} KV heads x {view.head_dim}, the index {n_heads} x {head_dim}"
        )
    if view.n_rows < stop or len(view.block_addresses) * view.block_tokens < stop:
        raise SchemaMismatchError(f"the view holds {view.n_rows} rows, the search needs {stop}")
    return view
