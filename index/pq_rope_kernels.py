"""Scores of keys that were coded before RoPE.

With pairs as complex numbers the score of a key with code c at position t is
sum over pairs i of Re(conj(q_i) c_i exp(1j angle_i t)). In a block of 64 positions, t = 64 u + v, the part
exp(1j angle_i 64 u) is folded into the query; what is left, exp(1j angle_i v), is a small table. The centroid is
turned by it once and meets all query heads of the group.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.phases import BLOCK, block_phase, super_phase
from kvstore.index.turned_dot import ROWS, turned_dot

ITEM = 4  # bytes of a float32


@functools.cache
def rope_scan(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the parallel kernel that scores rows of all KV heads, compiled for these sizes.

    n_pairs: RoPE pairs a sub-space; width: query heads at a time.
    `scan(codes, centroids, order, offsets, positions, angles, coarse, fine, start, stop, q, out)`: codes
    [n_kv_heads, >= stop, n_words]; centroids float32 [n_kv_heads, m, k, 2 n_pairs]; order int64 [head_dim];
    offsets, positions: of `Runs`; angles, coarse and fine: `angles`, `coarse` and `scan` of `RopeTables`;
    start, stop: offsets into codes; q float32 [n_kv_heads, group >= width, head_dim];
    out float32 [n_kv_heads, >= group, >= stop - start].
    """
    scan_run = _run_scanner(n_pairs, m, width, bits, per_word)

    @jit(parallel=True)
    def scan(codes, centroids, order, offsets, positions, angles, coarse, fine, start, stop, q, out):  # type: ignore[no-untyped-def]
        n_chunks = count_chunks(stop - start)
        n_runs = offsets.shape[0]
        for task in prange(q.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            row, high = start + low, start + high
            run = run_of(offsets, row)
            while row < high:
                end = min(high, offsets[run + 1]) if run + 1 < n_runs else high
                position = positions[run] + row - offsets[run]
                part = out[h, :, row - start : end - start]
                scan_run(codes[h, row:end], centroids[h], order, position, angles, coarse, fine, q[h], part)
                row, run = end, run + 1

    return scan


def _run_scanner(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for rows of one KV head at consecutive positions, block by block."""
    pairs = m * n_pairs
    score_block = _block_scorer(n_pairs, m, width, bits, per_word)

    @jit
    def scan_run(codes, centroids, order, position, angles, coarse, fine, q, out):  # type: ignore[no-untyped-def]
        group, n = q.shape[0], codes.shape[0]
        large, small = np.empty((2, pairs)), np.empty((2, pairs), np.float32)
        query, folded = np.empty((2, group, pairs), np.float32), np.empty((group, 2 * pairs), np.float32)
        parts, spare = np.empty(ROWS * m, np.int64), np.empty((width, ROWS), np.float32)
        _arrange_query(q, order, n_pairs, query[0], query[1])
        row = np.int64(0)
        while row < n:
            block = (position + row) // BLOCK
            v = position + row - block * BLOCK
            if row == 0 or block % BLOCK == 0:
                super_phase(block, angles, large)
            block_phase(block, large, coarse, small)
            for g in range(group):
                _fold(query[0, g], query[1, g], small[0], small[1], folded[g, :pairs], folded[g, pairs:])
            stop = min(n, row + BLOCK - v)
            for g in range(0, group, width):
                first = min(g, group - width)
                score_block(codes, row, stop, v, centroids, fine, folded[first:], parts, spare, out[first:])
            row = stop

    return scan_run


@jit
def _arrange_query(q: Any, order: Any, n_pairs: Any, real: Any, imaginary: Any) -> Any:
    """Split queries float32 [group, head_dim] into real and imaginary parts, [group, pairs], as pairs are arranged."""
    for g in range(q.shape[0]):
        for p in range(real.shape[1]):
            j, i = divmod(p, n_pairs)
            place = 2 * j * n_pairs + i
            real[g, p], imaginary[g, p] = q[g, order[place]], q[g, order[place + n_pairs]]


@jit
def run_of(offsets: Any, row: Any) -> Any:
    """Return the last run that begins at or before a row, by bisection."""
    low, high = np.int64(0), offsets.shape[0]
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@jit
def _fold(x: Any, y: Any, c: Any, s: Any, real: Any, imaginary: Any) -> Any:
    """Turn a query back by a block's phase: all float32 [pairs]; the last two are out."""
    for p in range(x.shape[0]):
        real[p] = x[p] * c[p] + y[p] * s[p]
        imaginary[p] = y[p] * c[p] - x[p] * s[p]


def _block_scorer(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for rows [row, stop) of one block, the first at v in it, and `width` query heads."""
    mask = (1 << bits) - 1
    pairs = m * n_pairs
    dot = turned_dot(n_pairs, m, width)

    @jit
    def score_block(codes, row, stop, v, centroids, fine, query, parts, spare, out):  # type: ignore[no-untyped-def]
        base, k = centroids.ctypes.data, centroids.shape[1]
        cosines, sines = fine[0].ctypes.data, fine[1].ctypes.data
        for t in range(row, stop, ROWS):
            for r in range(ROWS):
                line = codes[min(t + r, stop - 1)]
                for j in range(m):
                    code = (np.int64(line[j // per_word]) >> (bits * (j % per_word))) & mask
                    parts[r * m + j] = base + (j * k + code) * (2 * n_pairs * ITEM)
            turn = (v + t - row) * pairs * ITEM
            if t + ROWS <= stop:
                place = out.ctypes.data + t * ITEM
                dot(parts.ctypes.data, cosines + turn, sines + turn, query.ctypes.data, place, out.strides[0])
            else:
                dot(parts.ctypes.data, cosines + turn, sines + turn, query.ctypes.data, spare.ctypes.data, ROWS * ITEM)
                for g in range(width):
                    for r in range(stop - t):
                        out[g, t + r] = spare[g, r]

    return score_block
