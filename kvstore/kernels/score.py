"""Exact inner products of queries with chosen rows, where they lie."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from kvstore.index.jit import jit
from kvstore.kernels.row_kernels import TILE_ROWS, list_addresses, row_scorer, vector_dim


@functools.cache
def score_kernel(key_dim: int, dtype_code: int, group: int) -> Any:
    """Return the kernel for keys of this size and groups of so many query heads.

    `score(blocks, shift, head_bytes, row_bytes, rows, q, scores)`: blocks int64 [n_blocks] addresses; rows int64
    [n_kv_heads, n]; q float32 [n_kv_heads, group, key_dim]; scores float32 [n_kv_heads, group, n rounded up to fours],
    out.
    """
    score_rows = row_scorer(vector_dim(key_dim), dtype_code, group)

    @jit(parallel=True)
    def score(blocks: Any, shift: Any, head_bytes: Any, row_bytes: Any, rows: Any, q: Any, scores: Any) -> None:
        """See `score_kernel`."""
        table = blocks.ctypes.data
        for head in numba.prange(rows.shape[0]):
            addresses, line = np.empty(TILE_ROWS + 4, np.int64), rows[head]
            for low in range(0, line.shape[0], TILE_ROWS):
                part = line[low : low + TILE_ROWS]
                list_addresses(table, shift, head * head_bytes, row_bytes, part, addresses)
                score_rows(addresses, part.shape[0], addresses, 0, row_bytes, q[head], low, scores[head])

    return score
