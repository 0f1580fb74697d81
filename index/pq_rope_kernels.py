"""Scores of keys that were coded before RoPE.

With pairs as complex numbers the score of a key with code c at position t is
sum over pairs i of Re(conj(q_i) c_i exp(1j angle_i t)). In a block of 256 positions, t = 256 u + v, the part
exp(1j angle_i 256 u) is folded into the query; what is left, exp(1j angle_i v), is a small table. The centroid is
turned by it once and meets all query heads of the group. Both and the folded query are int16: see `short_codes`.

Tables and centroids may hold fewer pairs than the keys have, each KV head's own choice (`scan_subset`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.aligned import LINE_BYTES
from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import STRICT, jit
from kvstore.index.loads import prefetch
from kvstore.index.phases import BLOCK, super_phase
from kvstore.index.short_codes import LONGEST_PAIR, QUERY_NORM
from kvstore.index.turned_dot import ROWS, turned_back, turned_dots

FLOAT_BYTES, SHORT_BYTES = 4, 2

_ROWS_THAT_NAME_ALL = 256


@functools.cache
def rope_scan(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the parallel kernel that scores rows of all KV heads, compiled for these sizes.

    n_pairs: RoPE pairs a sub-space; width: query heads at a time.
    `scan(codes, centroids, units, gain, order, offsets, positions, angles, coarse, fine, start, stop, q, out)`: codes
    [n_kv_heads, >= stop, n_words]; centroids and units: of `ShortCentroids`; order int64 [lines, 2 m n_pairs];
    offsets, positions: of `Runs`; gain, angles, coarse and fine: `gain`, `angles`, `scan_coarse` and `scan` of
    `RopeTables`, [lines, ...]; start, stop: offsets into codes; q float32 [n_kv_heads, group >= width, head_dim];
    out float32 [n_kv_heads, >= group, >= stop - start]. `lines` is n_kv_heads, or 1 where all heads share them.
    """
    scan_run = run_scanner(n_pairs, m, width, bits, per_word)

    @jit(parallel=True)
    def scan(  # type: ignore[no-untyped-def]
        codes, centroids, units, gain, order, offsets, positions, angles, coarse, fine, start, stop, q, out
    ):  # fmt: skip
        """See `rope_scan`."""
        n_chunks = count_chunks(stop - start)
        n_runs = offsets.shape[0]
        for task in prange(q.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            own = h if order.shape[0] > 1 else 0
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            fetch_centroids(centroids[h].ctypes.data, centroids[h].nbytes, high - low)
            row, high = start + low, start + high
            run = run_of(offsets, row)
            while row < high:
                end = min(high, offsets[run + 1]) if run + 1 < n_runs else high
                position = positions[run] + row - offsets[run]
                part = out[h, :, row - start : end - start]
                scan_run(
                    codes[h, row:end], centroids[h], units[h], gain, order[own], position, angles[own], coarse[own],
                    fine[own], q[h], part,
                )  # fmt: skip
                row, run = end, run + 1

    return scan


@jit
def fetch_centroids(address: Any, n_bytes: Any, n_rows: Any) -> Any:
    """Ask the memory for all centroids of a KV head, if so many rows are scored that they name most.

    Between two searches of a layer the rest of the model has been through the caches, and rows name lines in any order.
    """
    if n_rows >= _ROWS_THAT_NAME_ALL:
        for at in range(0, n_bytes, LINE_BYTES):
            prefetch(address + at)


@functools.cache
def run_scanner(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for rows of one KV head at consecutive positions, block by block.

    Nothing is sliced inside the loop: a slice costs as much as a few rows.
    """
    pairs = m * n_pairs
    score_block = _block_scorer(n_pairs, m, width, bits, per_word)
    turn, fold = _turner(pairs, False), _turner(pairs, True)

    @jit
    def scan_run(codes, centroids, units, gain, order, position, angles, coarse, fine, q, out):  # type: ignore[no-untyped-def]
        """Score the rows of codes [n, n_words], the first at `position`: out [>= group, n]."""
        group, n = q.shape[0], codes.shape[0]
        query, turned = np.empty((2, group, 2, pairs), np.float32)
        folded, scales = _aligned_shorts(group, pairs), np.empty(group, np.float32)
        phase = np.empty((2, pairs), np.float32)
        parts, spare = np.empty((BLOCK, m), np.uint8), np.empty((width, ROWS), np.float32)
        _arrange_query(q, order, n_pairs, gain, query, scales)
        row = np.int64(0)
        while row < n:
            block = (position + row) // BLOCK
            v, u = position + row - block * BLOCK, block % BLOCK
            if row == 0 or u == 0:
                super_phase(block, angles, phase)
                turn(query, phase.ctypes.data, phase.ctypes.data + phase.strides[0], turned)
            cosines = coarse.ctypes.data + u * coarse.strides[1]
            fold(turned, cosines, cosines + coarse.strides[0], folded)
            stop = min(n, row + BLOCK - v)
            for g in range(0, group, width):
                first = min(g, group - width)
                score_block(codes, row, stop, v, centroids, units, fine, folded, scales, first, parts, spare, out)
            row = stop

    return scan_run


@jit
def _aligned_shorts(group: Any, pairs: Any) -> Any:
    """An uninitialised array, int16 [group, 2, pairs], from a cache line on."""
    room = np.empty(2 * group * pairs + LINE_BYTES // SHORT_BYTES, np.int16)
    first = (LINE_BYTES - room.ctypes.data % LINE_BYTES) // SHORT_BYTES
    return room[first : first + 2 * group * pairs].reshape(group, 2, pairs)


@jit(fastmath=STRICT)
def _arrange_query(q: Any, order: Any, n_pairs: Any, gain: Any, query: Any, scales: Any) -> Any:
    """Split queries float32 [group, head_dim] into real and imaginary parts, [group, 2, pairs], as pairs are arranged.

    Each query head is scaled as `short_codes` says; scales float32 [group], out: what turns its sums into scores.
    """
    for g in range(q.shape[0]):
        longest = total = 0.0
        for p in range(query.shape[2]):
            j, i = divmod(p, n_pairs)
            place = 2 * j * n_pairs + i
            x, y = q[g, order[place]], q[g, order[place + n_pairs]]
            query[g, 0, p], query[g, 1, p] = x, y
            square = np.float64(x) * x + np.float64(y) * y
            longest = max(longest, square)
            total += square
        step = max(np.sqrt(longest) / LONGEST_PAIR, np.sqrt(total) / QUERY_NORM)
        scales[g] = step * gain
        factor = 1.0 / step if step > 0.0 else 0.0
        for p in range(query.shape[2]):
            query[g, 0, p] *= factor
            query[g, 1, p] *= factor


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


def _turner(pairs: int, short: bool) -> Any:
    """Return the kernel that turns queries float32 [group, 2, pairs] back by a phase.

    cosines, sines: addresses of float32 [pairs]; out like the queries, int16 if `short`.
    """
    turn_head = turned_back(pairs, short)

    @jit
    def turn(query, cosines, sines, out):  # type: ignore[no-untyped-def]
        for g in range(query.shape[0]):
            turn_head(query.ctypes.data + g * query.strides[0], cosines, sines, out.ctypes.data + g * out.strides[0])

    return turn


def _block_scorer(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel for rows [row, stop) of one block, the first at v in it, and query heads [g, g + width)."""
    pairs, dots = m * n_pairs, turned_dots(n_pairs, m, width)
    unpack = _unpacker(m, bits, per_word)
    one_byte = bits == 8 and per_word == 1

    @jit
    def score_block(codes, row, stop, v, centroids, units, fine, query, scales, g, parts, spare, out):  # type: ignore[no-untyped-def]
        """query is the folded one; parts uint8 [>= 256, m] and spare [width, 4] are scratch."""
        base, own, heads = centroids.ctypes.data, units.ctypes.data, query.ctypes.data + g * query.strides[0]
        cosines, factors = fine.ctypes.data + v * pairs * SHORT_BYTES, scales.ctypes.data + g * FLOAT_BYTES
        place, k = out.ctypes.data + g * out.strides[0] + row * FLOAT_BYTES, centroids.shape[1]
        whole = (stop - row) // ROWS * ROWS
        if one_byte:
            words = codes.ctypes.data + row * m
        else:
            words = parts.ctypes.data
            unpack(codes, row, row + whole, parts)
        dots(
            words, whole // ROWS, k, base, own, cosines, cosines + fine.strides[0], heads, factors, place,
            out.strides[0],
        )  # fmt: skip
        if row + whole < stop:  # what comes behind these rows is another's
            unpack(codes, row + whole, stop, parts)
            cosines += whole * pairs * SHORT_BYTES
            dots(
                parts.ctypes.data, 1, k, base, own, cosines, cosines + fine.strides[0], heads, factors,
                spare.ctypes.data, ROWS * FLOAT_BYTES,
            )  # fmt: skip
            for i in range(width):
                for r in range(stop - row - whole):
                    out[g + i, row + whole + r] = spare[i, r]

    return score_block


def _unpacker(m: int, bits: int, per_word: int) -> Any:
    """Return the kernel that writes the codes of rows [row, stop) to out, uint8 [>= n, m]; the last fills a four."""
    mask = (1 << bits) - 1

    @jit
    def unpack(codes, row, stop, out):  # type: ignore[no-untyped-def]
        n = stop - row
        for t in range(-(-n // ROWS) * ROWS):
            line = row + min(t, n - 1)
            for j in range(m):
                out[t, j] = (np.int64(codes[line, j // per_word]) >> (bits * (j % per_word))) & mask

    return unpack
