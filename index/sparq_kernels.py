"""Inner products over a few channels of keys where they lie, in the blocks of a table."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.loads import LOADERS

_TILE_ROWS = 64  # whose cache lines stay until all channels have been taken from them


@functools.cache
def channel_scan(dtype_code: int) -> Any:
    """Return the parallel kernel that scores the rows of all KV heads by some channels, for keys of this dtype.

    `scan(addresses, block_tokens, head_stride_bytes, row_stride_bytes, start, stop, channels, weights, out)`:
    addresses int64 [n_blocks]; channels int64 [n_kv_heads, rank]; weights float32 [n_kv_heads, group, rank]; out
    float32 [n_kv_heads, >= group, >= stop - start] gets the sum over j of weights[j] * key[channels[j]].
    """
    load = LOADERS[dtype_code]

    @jit
    def score_tile(base, row_stride, n, channels, weights, tile, out, column):  # type: ignore[no-untyped-def]
        for j in range(channels.shape[0]):
            line, channel = tile[j], channels[j]
            for t in range(n):
                line[t] = load(base + t * row_stride, channel)
        for g in range(weights.shape[0]):
            target = out[g, column : column + n]
            for t in range(n):
                target[t] = 0.0
            for j in range(channels.shape[0]):
                line, weight = tile[j], weights[g, j]
                for t in range(n):
                    target[t] += weight * line[t]

    @jit
    def scan_chunk(addresses, block_tokens, row_stride, head_offset, start, stop, channels, weights, out, column):  # type: ignore[no-untyped-def]
        tile = np.empty((channels.shape[0], _TILE_ROWS), np.float32)
        row = start
        while row < stop:
            block = row // block_tokens
            inside = row - block * block_tokens
            n = min(block_tokens - inside, stop - row, _TILE_ROWS)
            base = addresses[block] + head_offset + inside * row_stride
            score_tile(base, row_stride, n, channels, weights, tile, out, column + row - start)
            row += n

    @jit(parallel=True)
    def scan(addresses, block_tokens, head_stride, row_stride, start, stop, channels, weights, out):  # type: ignore[no-untyped-def]
        n_chunks = count_chunks(stop - start)
        for task in prange(channels.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            scan_chunk(
                addresses, block_tokens, row_stride, h * head_stride, start + low, start + high,
                channels[h], weights[h], out[h], low,
            )  # fmt: skip

    return scan
