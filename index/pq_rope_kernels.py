"""Scores of keys that were coded before RoPE.

With pairs as complex numbers the score of a key with code c at position t is
sum over pairs i of Re(conj(q_i) c_i exp(1j angle_i t)). In a block of 64 positions, t = 64 u + v, the part
exp(1j angle_i 64 u) is folded into the query; what is left, exp(1j angle_i v), is a small table. The centroid is
turned by it once and meets all query heads of the group.

Tables and centroids may hold fewer pairs than the keys have, each KV head's own choice (`scan_subset`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.phases import BLOCK, block_phase, super_phase
from kvstore.index.turned_dot import ROWS, turned_back, turned_dot, turned_dot_of_bytes

ITEM = 4  # bytes of a float32


@functools.cache
def rope_scan(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the parallel kernel that scores rows of all KV heads, compiled for these sizes.

    n_pairs: RoPE pairs a sub-space; width: query heads at a time.
    `scan(codes, centroids, order, offsets, positions, angles, coarse, fine, start, stop, q, out)`: codes
    [n_kv_heads, >= stop, n_words]; centroids float32 [n_kv_heads, m, k, 2 n_pairs]; order int64 [lines,
    2 m n_pairs]; offsets, positions: of `Runs`; angles, coarse and fine: `angles`, `scan_coarse` and `scan` of
    `RopeTables`, [lines, ...]; start, stop: offsets into codes; q float32 [n_kv_heads, group >= width, head_dim];
    out float32 [n_kv_heads, >= group, >= stop - start]. `lines` is n_kv_heads, or 1 where all heads share them.
    """
    scan_run = run_scanner(n_pairs, m, width, bits, per_word)

    @jit(parallel=True)
    def scan(codes, centroids, order, offsets, positions, angles, coarse, fine, start, stop, q, out):  # type: ignore[no-untyped-def]
        """See `rope_scan`."""
        n_chunks = count_chunks(stop - start)
        n_runs = offsets.shape[0]
        for task in prange(q.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            own = h if order.shape[0] > 1 else 0
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            row, high = start + low, start + high
            run = run_of(offsets, row)
            while row < high:
                end = min(high, offsets[run + 1]) if run + 1 < n_runs else high
                position = positions[run] + row - offsets[run]
                part = out[h, :, row - start : end - start]
                scan_run(
                    codes[h, row:end], centroids[h], order[own], position, angles[own], coarse[own], fine[own], q[h],
                    part,
                )  # fmt: skip
                row, run = end, run + 1

    return scan


@functools.cache
def run_scanner(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for rows of one KV head at consecutive positions, block by block.

    Nothing is sliced inside the loop: a slice costs as much as a few rows.
    """
    pairs = m * n_pairs
    score_block = _block_scorer(n_pairs, m, width, bits, per_word)
    fold = _folder(pairs)

    @jit
    def scan_run(codes, centroids, order, position, angles, coarse, fine, q, out):  # type: ignore[no-untyped-def]
        """Score the rows of codes [n, n_words], the first at `position`: out [>= group, n]."""
        group, n = q.shape[0], codes.shape[0]
        large, small = np.empty((2, pairs), np.float32), np.empty((2, pairs), np.float32)
        query, folded = np.empty((2, group, pairs), np.float32), np.empty((group, 2, pairs), np.float32)
        parts, spare = np.empty(ROWS * m, np.int64), np.empty((width, ROWS), np.float32)
        _arrange_query(q, order, n_pairs, query[0], query[1])
        row = np.int64(0)
        while row < n:
            block = (position + row) // BLOCK
            v = position + row - block * BLOCK
            if row == 0 or block % BLOCK == 0:
                super_phase(block, angles, large)
            block_phase(block, large, coarse, small)
            fold(query, small, folded)
            stop = min(n, row + BLOCK - v)
            for g in range(0, group, width):
                score_block(codes, row, stop, v, centroids, fine, folded, min(g, group - width), parts, spare, out)
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


def _folder(pairs: int) -> Any:
    """Return the kernel that turns queries [2, group, pairs] back by a block's phase [2, pairs]: all float32.

    folded [group, 2, pairs].
    """
    turn = turned_back(pairs)
    line = pairs * ITEM

    @jit
    def fold(query, phase, folded):  # type: ignore[no-untyped-def]
        real, cosines, out = query.ctypes.data, phase.ctypes.data, folded.ctypes.data
        imaginary = real + query.strides[0]
        for g in range(query.shape[1]):
            turn(real + g * line, imaginary + g * line, cosines, cosines + line, out + 2 * g * line)

    return fold


def _block_scorer(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for rows [row, stop) of one block, the first at v in it, and query heads [g, g + width)."""
    pairs = m * n_pairs
    dot = turned_dot(n_pairs, m, width)
    find_parts = _part_finder(n_pairs, m, bits, per_word)
    score_bytes = _byte_scorer(n_pairs, m, width)
    one_byte = bits == 8 and per_word == 1

    @jit
    def score_block(codes, row, stop, v, centroids, fine, query, g, parts, spare, out):  # type: ignore[no-untyped-def]
        """Fours of rows, those of bytes without a list of addresses; query is the folded one."""
        cosines, sines = fine.ctypes.data, fine.ctypes.data + fine.strides[0]
        queries = query.ctypes.data + g * query.strides[0]
        start = row
        if one_byte:
            start = score_bytes(codes, row, stop, v, centroids, cosines, sines, queries, g, out)
        for t in range(start, stop, ROWS):
            find_parts(codes, t, stop, centroids, parts)
            turn = (v + t - row) * pairs * ITEM
            dot(parts.ctypes.data, cosines + turn, sines + turn, queries, spare.ctypes.data, ROWS * ITEM)
            for i in range(width):
                for r in range(min(ROWS, stop - t)):
                    out[g + i, t + r] = spare[i, r]

    return score_block


def _byte_scorer(n_pairs: int, m: int, width: int) -> Any:
    """Return the kernel for rows whose codes are a byte each: whole fours of [row, stop); it returns where it ended."""
    dot = turned_dot_of_bytes(n_pairs, m, width)
    pairs = m * n_pairs

    @jit
    def score_bytes(codes, row, stop, v, centroids, cosines, sines, queries, g, out):  # type: ignore[no-untyped-def]
        base, k, turn = centroids.ctypes.data, centroids.shape[1], (v - row) * pairs * ITEM
        words, place = codes.ctypes.data, out.ctypes.data + g * out.strides[0]
        last = row + (stop - row) // ROWS * ROWS
        for t in range(row, last, ROWS):
            at = turn + t * pairs * ITEM
            dot(words + t * m, base, k, cosines + at, sines + at, queries, place + t * ITEM, out.strides[0])
        return last

    return score_bytes


def _part_finder(n_pairs: int, m: int, bits: int, per_word: int) -> Any:
    """Return the kernel that writes where the centroids of rows [t, t + 4) lie; beyond `stop` those of the last."""
    mask = (1 << bits) - 1

    @jit
    def find_parts(codes, t, stop, centroids, parts):  # type: ignore[no-untyped-def]
        base, k = centroids.ctypes.data, centroids.shape[1]
        for r in range(ROWS):
            line = codes[min(t + r, stop - 1)]
            for j in range(m):
                code = (np.int64(line[j // per_word]) >> (bits * (j % per_word))) & mask
                parts[r * m + j] = base + (j * k + code) * (2 * n_pairs * ITEM)

    return find_parts
