"""Scores of several sequences' keys that were coded before RoPE; see `pq_rope_kernels`."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, prange

from kvstore.index.batch_kernels import (
    CENTROIDS,
    CHUNK,
    CODES,
    HEAD,
    LINE,
    N_CENTROIDS,
    N_RUNS,
    OFFSETS,
    PLACE,
    POSITIONS,
    ROOM_ROWS,
    START,
    STOP,
    UNITS,
    list_tasks,
    scores_of,
)
from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.pointers import pointer_to
from kvstore.index.pq_rope_kernels import FLOAT_BYTES, SHORT_BYTES, fetch_centroids, run_of, run_scanner


@functools.cache
def rope_batch_scan(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the parallel kernel that scores rows of several sequences, compiled for the sizes of `rope_scan`.

    `scan(lines, gain, order, angles, coarse, fine, q, scores)`: lines int64 [n, 16], columns as `batch_kernels` says;
    gain, order, angles, coarse and fine as for `rope_scan`, shared by all, without their first axis; q float32
    [n_sequences, n_kv_heads, group, head_dim], C-order; scores float32 [..], out: [n_kv_heads, group + 1, STOP - START]
    of each line, from SCORES on, of which the first `group` lines a head are written.
    """
    scan_chunk = _chunk_scanner(n_pairs, m, width, bits, per_word)

    @jit(parallel=True)
    def scan(lines, gain, order, angles, coarse, fine, q, scores):  # type: ignore[no-untyped-def]
        """See `rope_batch_scan`."""
        tasks, group = list_tasks(lines, q.shape[1]), q.shape[2]
        for i in prange(tasks.shape[0]):
            line, h = lines[tasks[i, LINE]], tasks[i, HEAD]
            scan_chunk(
                line, h, tasks[i, CHUNK], gain, order, angles, coarse, fine, q[line[PLACE], h],
                scores_of(scores, line, h, group),
            )  # fmt: skip

    return scan


def _chunk_scanner(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel that scores one chunk of the rows of one KV head, run by run of positions."""
    scan_run = run_scanner(n_pairs, m, width, bits, per_word)
    words_at = pointer_to("uint16" if bits * per_word > 8 else "uint8")
    int64_at, short_at, float32_at = pointer_to("int64"), pointer_to("int16"), pointer_to("float32")
    n_words, word_bytes = -(-m // per_word), 2 if bits * per_word > 8 else 1

    @jit
    def scan_chunk(line, h, chunk, gain, order, angles, coarse, fine, q, out):  # type: ignore[no-untyped-def]
        """line int64 [15]; q float32 [group, head_dim]; out float32 [> group, STOP - START]; the rest as above."""
        room, k, n_runs = line[ROOM_ROWS], line[N_CENTROIDS], line[N_RUNS]
        start, n = line[START], line[STOP] - line[START]
        low, high = chunk_bounds(n, count_chunks(n), chunk)
        codes = carray(words_at(line[CODES] + h * room * n_words * word_bytes), (room, n_words))
        own = m * k * 2 * n_pairs * SHORT_BYTES
        fetch_centroids(line[CENTROIDS] + h * own, own, high - low)
        centroids = carray(short_at(line[CENTROIDS] + h * own), (m, k, 2 * n_pairs))
        units = carray(float32_at(line[UNITS] + h * m * k * FLOAT_BYTES), (m, k))
        offsets = carray(int64_at(line[OFFSETS]), (n_runs,))
        positions = carray(int64_at(line[POSITIONS]), (n_runs,))
        row, high = start + low, start + high
        run = run_of(offsets, row)
        while row < high:
            end = min(high, offsets[run + 1]) if run + 1 < n_runs else high
            position = positions[run] + row - offsets[run]
            part = out[:, row - start : end - start]
            scan_run(codes[row:end], centroids, units, gain, order, position, angles, coarse, fine, q, part)
            row, run = end, run + 1

    return scan_chunk
