"""Where the rows of a table lie in memory, as kernels see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
DTYPE_CODES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
ITEM_BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2}


@dataclass(frozen=True, slots=True)
class RowView:
    """Addresses of the rows of one table's keys (or values), block by block.

    Row t of KV head h begins at `block_addresses[t // block_tokens] + h * head_stride_bytes
    + (t % block_tokens) * row_stride_bytes` and holds `head_dim` contiguous numbers of the dtype.

    Attributes:
        block_addresses: int64 [>= ceil(n_rows / block_tokens)], C-order.
        n_rows: rows that may be read.
        n_kv_heads, head_dim, block_tokens: sizes.
        head_stride_bytes, row_stride_bytes: distances inside a block.
        dtype_code: FLOAT32, FLOAT16 or BFLOAT16.
        owner: whatever keeps the memory alive.
        bring: for rows that are not all in memory: `bring(start, stop)` yields ranges that make up [start, stop); the
            addresses of each are right until the next is asked for. None where they always are.
    """

    block_addresses: npt.NDArray[np.int64]
    n_rows: int
    n_kv_heads: int
    head_dim: int
    block_tokens: int
    head_stride_bytes: int
    row_stride_bytes: int
    dtype_code: int
    owner: Any = None
    bring: Callable[[int, int], Iterator[tuple[int, int]]] | None = None

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges that make up [start, stop), each to be read before the next is asked for."""
        if self.bring is None:
            yield start, stop
        else:
            yield from self.bring(start, stop)

    @classmethod
    def of(cls, array: npt.NDArray[Any], dtype: str | None = None) -> RowView:
        """View a C-order array [n_kv_heads, n_rows, head_dim] as one block.

        float32 and float16 arrays speak for themselves; bfloat16 rows come as uint16 with `dtype="bfloat16"`.
        """
        array = np.ascontiguousarray(array)
        heads, rows, dim = array.shape
        code = DTYPE_CODES[dtype or array.dtype.name]
        if array.dtype.itemsize != ITEM_BYTES[code]:
            raise ValueError(f"{array.dtype} rows cannot be read as {dtype}")
        return cls(
            block_addresses=np.array([array.ctypes.data], np.int64),
            n_rows=rows,
            n_kv_heads=heads,
            head_dim=dim,
            block_tokens=max(rows, 1),
            head_stride_bytes=rows * dim * array.dtype.itemsize,
            row_stride_bytes=dim * array.dtype.itemsize,
            dtype_code=code,
            owner=array,
        )
