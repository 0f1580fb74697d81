"""Scan and rank for several sequences at once: what they read lies where a table of addresses says.

The work is cut as for one sequence and done by the same kernels, so that the results are the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, prange

from kvstore.index.aligned import LINE_BYTES
from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.loads import prefetch
from kvstore.index.pointers import pointer_to
from kvstore.index.pq_rope_kernels import ITEM, run_of, run_scanner
from kvstore.index.rank import rank_head

# Columns of `lines`, int64 [n, 15]. First what each search says: its place in the batch; rows of the codes
# [START, STOP); rows wanted; row id of row START; where its lines begin in the buffers.
PLACE, START, STOP, N_PICKED, FIRST_ROW, SCORES, PLACES, ROWS = range(8)
# Then what the index says: see `BatchLine.numbers`.
CODES, ROOM_ROWS, OFFSETS, POSITIONS, N_RUNS, CENTROIDS, N_CENTROIDS = range(8, 15)
# Columns of tasks, int64 [n_tasks, 3].
LINE, HEAD, CHUNK = range(3)


@functools.cache
def rope_batch_scan(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the parallel kernel that scores rows of several sequences, compiled for the sizes of `rope_scan`.

    `scan(lines, order, angles, coarse, fine, q, scores)`: lines int64 [n, 15], columns as above; order, angles, coarse
    and fine as for `rope_scan`, shared by all, without their first axis; q float32 [n_sequences, n_kv_heads, group,
    head_dim], C-order; scores float32 [..], out: [n_kv_heads, group + 1, STOP - START] of each line, from SCORES on,
    of which the first `group` lines a head are written.
    """
    scan_chunk = _chunk_scanner(n_pairs, m, width, bits, per_word)

    @jit(parallel=True)
    def scan(lines, order, angles, coarse, fine, q, scores):  # type: ignore[no-untyped-def]
        """See `rope_batch_scan`."""
        tasks, group = _list_tasks(lines, q.shape[1]), q.shape[2]
        for i in prange(tasks.shape[0]):
            line, h = lines[tasks[i, LINE]], tasks[i, HEAD]
            scan_chunk(
                line, h, tasks[i, CHUNK], order, angles, coarse, fine, q[line[PLACE], h],
                _scores_of(scores, line, h, group),
            )  # fmt: skip

    return scan


@jit(parallel=True)
def rank_batch(
    lines: Any, scores: Any, scale: Any, reduction: Any, places: Any, rows: Any, picked: Any, log_norm: Any
) -> Any:
    """Do for each line of `lines` what `rank_heads` does for one sequence.

    lines, scores: as in `rope_batch_scan`; places int32 [..], scratch, [n_kv_heads, STOP - START + 1] a line from
    PLACES on; rows int64 [..] and picked float32 [..], out, [n_kv_heads, N_PICKED] a line from ROWS on; log_norm
    float32 [n_sequences, n_kv_heads, group], out.
    """
    n_heads, group = log_norm.shape[1:]
    for i in prange(lines.shape[0] * n_heads):
        h, b = divmod(np.int64(i), lines.shape[0])  # prange counts in uint64
        line = lines[b]
        k, n = line[N_PICKED], line[STOP] - line[START]
        own, place, row = _scores_of(scores, line, h, group), line[PLACES] + h * (n + 1), line[ROWS] + h * k
        rank_head(
            own[:group], np.float32(scale), reduction, k, line[FIRST_ROW], places[place : place + n + 1], own[group],
            rows[row : row + k], picked[row : row + k], log_norm[line[PLACE], h],
        )  # fmt: skip


@jit
def _list_tasks(lines: Any, n_heads: Any) -> Any:
    """List the chunks of rows to scan: int64 [n_tasks, 3].

    Heads outermost: a thread takes tasks that lie side by side, and so gets a share of each sequence, long or short.
    """
    count = 0
    for b in range(lines.shape[0]):
        count += count_chunks(lines[b, STOP] - lines[b, START])
    tasks = np.empty((n_heads * count, 3), np.int64)
    at = 0
    for h in range(n_heads):
        for b in range(lines.shape[0]):
            for chunk in range(count_chunks(lines[b, STOP] - lines[b, START])):
                tasks[at, LINE], tasks[at, HEAD], tasks[at, CHUNK] = b, h, chunk
                at += 1
    return tasks


@jit
def _scores_of(scores: Any, line: Any, h: Any, group: Any) -> Any:
    """The scores of one KV head of a line, float32 [group + 1, STOP - START]."""
    n = line[STOP] - line[START]
    first = line[SCORES] + h * (group + 1) * n
    return scores[first : first + (group + 1) * n].reshape(group + 1, n)


@jit
def _fetch(address: Any, n_bytes: Any) -> Any:
    """Ask the memory for all of an array: the rows of a sequence name its lines one by one, in any order."""
    for at in range(0, n_bytes, LINE_BYTES):
        prefetch(address + at)


def _chunk_scanner(n_pairs: int, m: int, width: int, bits: int, per_word: int) -> Any:
    """Return the kernel that scores one chunk of the rows of one KV head, run by run of positions."""
    scan_run = run_scanner(n_pairs, m, width, bits, per_word)
    words_at = pointer_to("uint16" if bits * per_word > 8 else "uint8")
    int64_at, float32_at = pointer_to("int64"), pointer_to("float32")
    n_words, word_bytes = -(-m // per_word), 2 if bits * per_word > 8 else 1

    @jit
    def scan_chunk(line, h, chunk, order, angles, coarse, fine, q, out):  # type: ignore[no-untyped-def]
        """line int64 [15]; q float32 [group, head_dim]; out float32 [> group, STOP - START]; the rest as above."""
        room, k, n_runs = line[ROOM_ROWS], line[N_CENTROIDS], line[N_RUNS]
        start, n = line[START], line[STOP] - line[START]
        low, high = chunk_bounds(n, count_chunks(n), chunk)
        codes = carray(words_at(line[CODES] + h * room * n_words * word_bytes), (room, n_words))
        own = m * k * 2 * n_pairs * ITEM
        if high - low >= k:
            _fetch(line[CENTROIDS] + h * own, own)
        centroids = carray(float32_at(line[CENTROIDS] + h * own), (m, k, 2 * n_pairs))
        offsets = carray(int64_at(line[OFFSETS]), (n_runs,))
        positions = carray(int64_at(line[POSITIONS]), (n_runs,))
        row, high = start + low, start + high
        run = run_of(offsets, row)
        while row < high:
            end = min(high, offsets[run + 1]) if run + 1 < n_runs else high
            position = positions[run] + row - offsets[run]
            part = out[:, row - start : end - start]
            scan_run(codes[row:end], centroids, order, position, angles, coarse, fine, q, part)
            row, run = end, run + 1

    return scan_chunk
