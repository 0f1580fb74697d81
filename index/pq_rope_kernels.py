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
    score_block = _block_scorer(n_pairs, m, width, bits, per_word)
    pairs = m * n_pairs

    @jit
    def fold(q, order, phase, real, imaginary):  # type: ignore[no-untyped-def]
        """Turn the queries back by the block's phase: real, imaginary float32 [group, pairs]."""
        for g in range(q.shape[0]):
            for j in range(m):
                for i in range(n_pairs):
                    p, place = j * n_pairs + i, 2 * j * n_pairs + i
                    x, y = q[g, order[place]], q[g, order[place + n_pairs]]
                    c, s = np.float32(phase[0, p]), np.float32(phase[1, p])
                    real[g, p] = x * c + y * s
                    imaginary[g, p] = y * c - x * s

    @jit
    def scan_run(codes, centroids, order, position, angles, coarse, fine, q, out):  # type: ignore[no-untyped-def]
        """Score rows at consecutive positions from `position` on."""
        group, n = q.shape[0], codes.shape[0]
        large, small = np.empty((2, pairs)), np.empty((2, pairs))
        real, imaginary = np.empty((group, pairs), np.float32), np.empty((group, pairs), np.float32)
        row = 0
        while row < n:
            block = (position + row) // BLOCK
            v = position + row - block * BLOCK
            if row == 0 or block % BLOCK == 0:
                super_phase(block, angles, large)
            block_phase(block, large, coarse, small)
            fold(q, order, small, real, imaginary)
            stop = min(n, row + BLOCK - v)
            for g in range(0, group, width):
                score_block(codes, row, stop, v, centroids, fine, real, imaginary, min(g, group - width), out)
            row = stop

    @jit(parallel=True)
    def scan(codes, centroids, order, offsets, positions, angles, coarse, fine, start, stop, q, out):  # type: ignore[no-untyped-def]
        n_chunks = count_chunks(stop - start)
        n_runs = offsets.shape[0]
        for task in prange(q.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            row, high = start + low, start + high
            run = np.searchsorted(offsets, row, side="right") - 1
            while row < high:
                end = min(high, offsets[run + 1]) if run + 1 < n_runs else high
                position = positions[run] + row - offsets[run]
                part = out[h, :, row - start : end - start]
                scan_run(codes[h, row:end], centroids[h], order, position, angles, coarse, fine, q[h], part)
                row, run = end, run + 1

    return scan


def _block_scorer(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for the rows of one block: one accumulator a query head, one turn a pair."""
    mask = (1 << bits) - 1

    @jit
    def score_block(codes, row, stop, v, centroids, fine, real, imaginary, g, out):  # type: ignore[no-untyped-def]
        a0, a1, a2, a3 = real[g], real[g + min(1, width - 1)], real[g + min(2, width - 1)], real[g + width - 1]
        b0, b1 = imaginary[g], imaginary[g + min(1, width - 1)]
        b2, b3 = imaginary[g + min(2, width - 1)], imaginary[g + width - 1]
        for t in range(row, stop):
            s0 = s1 = s2 = s3 = np.float32(0.0)
            cosines, sines = fine[0, v + t - row], fine[1, v + t - row]
            for j in range(m):
                code = (np.int64(codes[t, j // per_word]) >> (bits * (j % per_word))) & mask
                centroid = centroids[j, code]
                o = j * n_pairs
                for i in range(n_pairs):
                    x, y, c, s = centroid[i], centroid[n_pairs + i], cosines[o + i], sines[o + i]
                    kr, ki = x * c - y * s, x * s + y * c
                    s0 += a0[o + i] * kr + b0[o + i] * ki
                    if width > 1:
                        s1 += a1[o + i] * kr + b1[o + i] * ki
                    if width > 2:
                        s2 += a2[o + i] * kr + b2[o + i] * ki
                    if width > 3:
                        s3 += a3[o + i] * kr + b3[o + i] * ki
            out[g, t] = s0
            if width > 1:
                out[g + 1, t] = s1
            if width > 2:
                out[g + 2, t] = s2
            if width > 3:
                out[g + 3, t] = s3

    return score_block
