"""Codes of one number each: rounding to them, and inner products with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit

_TILE_ROWS = 64  # unpacked once, they stay in cache while all query heads of the group are scored


@jit(parallel=True)
def encode_scalars(keys: Any, low: Any, inverse_step: Any, bits: Any, start: Any, codes: Any) -> Any:
    """Write the codes of keys to `codes[:, start:]`, KV heads in parallel.

    keys: float32 [n_kv_heads, n, head_dim]. low, inverse_step: float32 [n_kv_heads, head_dim].
    codes: uint8 [n_kv_heads, >= start + n, n_bytes], out. A number x becomes (x - low) * inverse_step, rounded,
    clamped to [0, 2**bits - 1]. Of 8 bits each has a byte; of 4 bits, byte j holds channel j in its lower half and
    channel n_bytes + j in its upper half.
    """
    for h in prange(keys.shape[0]):
        top = np.float32((1 << bits) - 1)
        n_bytes = codes.shape[2]
        for t in range(keys.shape[1]):
            line = codes[h, start + t]
            for d in range(keys.shape[2]):
                x = (keys[h, t, d] - low[h, d]) * inverse_step[h, d]
                x = x if x > 0 else np.float32(0)  # also where a constant channel made NaN of a far number
                code = np.uint8((x if x < top else top) + np.float32(0.5))
                if d < n_bytes:
                    line[d] = code
                else:
                    line[d - n_bytes] |= np.uint8(code << 4)


@functools.cache
def scalar_scan(bits: int) -> Any:
    """Return the parallel kernel that scores the rows of all KV heads, for codes of so many bits.

    `scan(codes, weights, offsets, start, stop, out)`: codes uint8 [n_kv_heads, >= stop, n_bytes]; weights float32
    [n_kv_heads, group, n_bytes * 8 / bits], what a step of each code is worth; offsets float32 [n_kv_heads, group];
    out float32 [n_kv_heads, >= group, >= stop - start] gets offset + sum over j of weights[j] * code[j].
    """
    score_chunk = _chunk_scorer(bits)

    @jit(parallel=True)
    def scan(codes, weights, offsets, start, stop, out):  # type: ignore[no-untyped-def]
        n_chunks = count_chunks(stop - start)
        for task in prange(codes.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            score_chunk(codes[h], weights[h], offsets[h], start, low, high, out[h])

    return scan


def _chunk_scorer(bits: int) -> Any:
    """Return the kernel for rows [low, high) of one KV head: unpack a tile, then a product a row and query head."""

    @jit
    def score_chunk(codes, weights, offsets, start, low, high, out):  # type: ignore[no-untyped-def]
        """codes uint8 [n, n_bytes], weights float32 [group, n_codes], offsets float32 [group]; out[:, low:high]."""
        n_bytes, n_codes = codes.shape[1], weights.shape[1]
        tile = np.empty((_TILE_ROWS, n_codes), np.float32)
        for first in range(low, high, _TILE_ROWS):
            n = min(_TILE_ROWS, high - first)
            for t in range(n):
                code, line = codes[start + first + t], tile[t]
                for j in range(n_bytes):
                    line[j] = np.float32(code[j] & 15 if bits == 4 else code[j])
                if bits == 4:
                    upper = line[n_bytes:]
                    for j in range(n_bytes):
                        upper[j] = np.float32(code[j] >> 4)
            for g in range(weights.shape[0]):
                w = weights[g]
                for t in range(n):
                    total = np.float32(0.0)
                    line = tile[t]
                    for j in range(n_codes):
                        total += line[j] * w[j]
                    out[g, first + t] = total + offsets[g]

    return score_chunk
