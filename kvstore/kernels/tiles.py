"""Tiles: a few rows copied to float32, so that one set of loops serves every dtype and every place a row lies in.

A tile of 64 rows stays in the L1/L2 cache; copying it costs less than reading rows twice from memory, hides their
latency, and lets the loops over it vectorise as if the rows had been contiguous float32 all along.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from kvstore.index.fast_exp import fast_exp
from kvstore.index.jit import jit
from kvstore.index.loads import LOADERS, float32_pointer, load_int64, prefetch
from kvstore.index.rows import FLOAT32

TILE_ROWS = 64
LINE_BYTES = 64


def constant_dim(dim: int) -> int:
    """Sizes worth a kernel of their own (twice as fast); 0 stands for all others, read at run time."""
    return dim if dim % 32 == 0 else 0


@jit
def row_address(blocks: Any, shift: Any, head_offset: Any, row_stride: Any, row: Any) -> Any:
    """Address of a row: blocks is the address of the table's int64 block addresses, strides are in bytes."""
    mask = (1 << shift) - 1
    return load_int64(blocks, row >> shift) + head_offset + (row & mask) * row_stride


@jit
def fetch_rows(blocks: Any, shift: Any, head_offset: Any, row_stride: Any, row_bytes: Any, rows: Any) -> Any:
    """Ask the memory for these rows (int64 [n]) before they are needed."""
    for row in rows:
        address = row_address(blocks, shift, head_offset, row_stride, row)
        for line in range(0, row_bytes, LINE_BYTES):
            prefetch(address + line)


@functools.cache
def tile_loader(dtype_code: int, const_dim: int) -> Any:
    """Return the kernel `load(addresses int64 [n], n, dim, tile float32 [>= n, dim])` for rows of one dtype."""
    load = LOADERS[dtype_code]

    @jit
    def load_tile(addresses: Any, n: Any, dim: Any, tile: Any) -> None:
        """See `tile_loader`."""
        size = const_dim if const_dim > 0 else dim
        for i in range(n):
            address, line = addresses[i], tile[i]
            for d in range(size):
                line[d] = load(address, d)

    return load_tile


@functools.cache
def run_reader(dtype_code: int, const_dim: int) -> Any:
    """Return the kernel `read(address, n, dim, tile) -> float32 [n, dim]` for n rows that lie one behind the other.

    float32 rows are seen where they are: no copy, and the memory's own prefetcher does its best. Others go to the tile.
    """
    if dtype_code == FLOAT32:

        @jit
        def see_rows(address: Any, n: Any, dim: Any, tile: Any) -> Any:
            """See `run_reader`; no copy."""
            return numba.carray(float32_pointer(address), (n, dim))

        return see_rows
    load = LOADERS[dtype_code]

    @jit
    def copy_rows(address: Any, n: Any, dim: Any, tile: Any) -> Any:
        """See `run_reader`."""
        size = const_dim if const_dim > 0 else dim
        for i in range(n):
            line = tile[i]
            for d in range(size):
                line[d] = load(address, i * size + d)
        return tile

    return copy_rows


@functools.cache
def tile_scorer(const_dim: int) -> Any:
    """Return the kernel `score(tile [n, dim], n, dim, q float32 [group, dim], at, scores float32 [group, >= at + n])`.

    Inner products, written from column `at` on. Four query heads share each load of a row.
    """

    @jit
    def score_tile(tile: Any, n: Any, dim: Any, q: Any, at: Any, scores: Any) -> None:
        """See `tile_scorer`."""
        size = const_dim if const_dim > 0 else dim
        group = q.shape[0]
        g = 0
        while g + 4 <= group:
            q0, q1, q2, q3 = q[g], q[g + 1], q[g + 2], q[g + 3]
            for i in range(n):
                row = tile[i]
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for d in range(size):
                    x = row[d]
                    s0 += q0[d] * x
                    s1 += q1[d] * x
                    s2 += q2[d] * x
                    s3 += q3[d] * x
                scores[g, at + i] = s0
                scores[g + 1, at + i] = s1
                scores[g + 2, at + i] = s2
                scores[g + 3, at + i] = s3
            g += 4
        while g < group:
            q0 = q[g]
            for i in range(n):
                row = tile[i]
                s0 = np.float32(0)
                for d in range(size):
                    s0 += q0[d] * row[d]
                scores[g, at + i] = s0
            g += 1

    return score_tile


@functools.cache
def tile_adder(const_dim: int) -> Any:
    """Return the kernel `add(tile [n, dim], n, dim, weights float32 [group, >= n], sums float32 [group, dim])`.

    sums[g] += weights[g] @ tile, eight rows at a time, so that a sum is loaded and stored once for eight rows.
    """

    @jit
    def add_tile(tile: Any, n: Any, dim: Any, weights: Any, sums: Any) -> None:
        """See `tile_adder`."""
        size = const_dim if const_dim > 0 else dim
        for g in range(weights.shape[0]):
            total, w = sums[g], weights[g]
            i = 0
            while i + 8 <= n:
                w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
                w4, w5, w6, w7 = w[i + 4], w[i + 5], w[i + 6], w[i + 7]
                t0, t1, t2, t3 = tile[i], tile[i + 1], tile[i + 2], tile[i + 3]
                t4, t5, t6, t7 = tile[i + 4], tile[i + 5], tile[i + 6], tile[i + 7]
                for d in range(size):
                    a = (w0 * t0[d] + w1 * t1[d]) + (w2 * t2[d] + w3 * t3[d])
                    b = (w4 * t4[d] + w5 * t5[d]) + (w6 * t6[d] + w7 * t7[d])
                    total[d] += a + b
                i += 8
            while i < n:
                w0, t0 = w[i], tile[i]
                for d in range(size):
                    total[d] += w0 * t0[d]
                i += 1

    return add_tile


@jit
def soften(scores: Any, n: Any, peak: Any, norm: Any, sums: Any) -> None:
    """Turn a tile of scores [group, n] into weights in place, for a softmax that goes on tile by tile.

    Online softmax (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3): peak [group] is the largest score so far,
    norm [group] the sum of exp(score - peak), sums [group, dim] the weighted values; a new peak scales both down.
    """
    for g in range(scores.shape[0]):
        line, old = scores[g], peak[g]
        top = old
        for i in range(n):
            top = max(top, line[i])
        if top > old:
            shrink = fast_exp(old - top)
            norm[g] *= shrink
            total = sums[g]
            for d in range(total.shape[0]):
                total[d] *= shrink
            peak[g] = top
        added = np.float32(0)
        for i in range(n):
            x = fast_exp(line[i] - top)
            line[i] = x
            added += x
        norm[g] += added
