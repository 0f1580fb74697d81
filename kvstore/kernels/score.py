"""Exact inner products of queries with chosen rows, where they lie."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from kvstore.index.jit import jit
from kvstore.kernels.tiles import TILE_ROWS, constant_dim, row_address, tile_loader, tile_scorer


@functools.cache
def score_kernel(key_dim: int, dtype_code: int) -> Any:
    """Return the kernel for keys of this size.

    `score(blocks, shift, head_bytes, row_bytes, rows, q, scores)`: blocks int64 [n_blocks] addresses; rows int64
    [n_kv_heads, n]; q float32 [n_kv_heads, group, key_dim]; scores float32 [n_kv_heads, group, n], out.
    """
    load_keys = tile_loader(dtype_code, constant_dim(key_dim))
    score_tile = tile_scorer(constant_dim(key_dim))

    @jit(parallel=True)
    def score(blocks: Any, shift: Any, head_bytes: Any, row_bytes: Any, rows: Any, q: Any, scores: Any) -> None:
        """See `score_kernel`."""
        table = blocks.ctypes.data
        for head in numba.prange(rows.shape[0]):
            tile = np.empty((TILE_ROWS, q.shape[2]), np.float32)
            addresses = np.empty(TILE_ROWS, np.int64)
            for low in range(0, rows.shape[1], TILE_ROWS):
                n = min(TILE_ROWS, rows.shape[1] - low)
                for i in range(n):
                    addresses[i] = row_address(table, shift, head * head_bytes, row_bytes, rows[head, low + i])
                load_keys(addresses, n, q.shape[2], tile)
                score_tile(tile, n, q.shape[2], q[head], low, scores[head])

    return score
