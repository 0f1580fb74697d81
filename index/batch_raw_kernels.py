"""Scores of several sequences' keys that were coded as they are stored; see `pq_raw_kernels`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, prange

from kvstore.index.batch_kernels import (
    CENTROIDS,
    CHUNK,
    CODES,
    HEAD,
    LINE,
    N_CENTROIDS,
    PLACE,
    ROOM_ROWS,
    START,
    STOP,
    list_tasks,
    scores_of,
)
from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.packed_kernels import LINE_BYTES
from kvstore.index.pointers import pointer_to
from kvstore.index.pq_raw_kernels import packed_scorer, row_scorer, table_filler
from kvstore.index.pq_rope_kernels import FLOAT_BYTES


@functools.cache
def raw_batch_scan(m: int, bits: int, per_word: int, packed: bool) -> Any:
    """Return the parallel kernel that scores rows of several sequences, compiled for the sizes of `raw_scan`.

    `scan(lines, order, q, tables, scores)`: lines int64 [n, 16], columns as `batch_kernels` says; order int64
    [head_dim], shared by all; q and scores as for `rope_batch_scan`; tables float32 [n, n_kv_heads, group,
    `table_size`], scratch.
    """
    n_words, fill_tables = -(-m // per_word), table_filler(m, bits, per_word)
    score_rows = (packed_scorer if packed else row_scorer)(n_words, bits * per_word)
    codes_of = _codes_finder(n_words, bits * per_word > 8, packed)
    float32_at = pointer_to("float32")

    @jit
    def fill(line, h, order, q, tables):  # type: ignore[no-untyped-def]
        """Make the table of one query head of KV head h: q float32 [head_dim], tables float32 [`table_size`], out."""
        sub_dim, k = order.shape[0] // m, line[N_CENTROIDS]
        laid = carray(float32_at(line[CENTROIDS] + h * m * sub_dim * k * FLOAT_BYTES), (m, sub_dim, k))
        fill_tables(laid, order, q, tables)

    @jit
    def scan_chunk(line, h, chunk, tables, out):  # type: ignore[no-untyped-def]
        """Score a chunk of rows of KV head h: tables float32 [group, `table_size`], out [> group, STOP - START]."""
        start, n = line[START], line[STOP] - line[START]
        low, high = chunk_bounds(n, count_chunks(n), chunk)
        score_rows(codes_of(line, h), start + low, start + high, tables, out, low)

    @jit(parallel=True)
    def scan(lines, order, q, tables, scores):  # type: ignore[no-untyped-def]
        """See `raw_batch_scan`."""
        n_heads, group = q.shape[1:3]
        tasks = list_tasks(lines, n_heads)
        for i in prange(lines.shape[0] * n_heads * group):
            b, rest = divmod(np.int64(i), n_heads * group)  # prange counts in uint64
            h, g = divmod(rest, group)
            fill(lines[b], h, order, q[lines[b, PLACE], h, g], tables[b, h, g])
        for i in prange(tasks.shape[0]):
            b, h = tasks[i, LINE], tasks[i, HEAD]
            scan_chunk(lines[b], h, tasks[i, CHUNK], tables[b, h], scores_of(scores, lines[b], h, group))

    return scan


def _codes_finder(n_words: int, wide: bool, packed: bool) -> Any:
    """Return the kernel that finds the codes of one KV head, as `CodeRows` or `PackedRows` keep them."""
    uint8_at, words_at = pointer_to("uint8"), pointer_to("uint16" if wide else "uint8")
    word_bytes = 2 if wide else 1

    @jit
    def packed_codes(line, h):  # type: ignore[no-untyped-def]
        """uint8 [n_blocks, n_words, LINE_BYTES]."""
        n_blocks = line[ROOM_ROWS]
        return carray(uint8_at(line[CODES] + h * n_blocks * n_words * LINE_BYTES), (n_blocks, n_words, LINE_BYTES))

    @jit
    def codes(line, h):  # type: ignore[no-untyped-def]
        """uint8 or uint16 [n_rows, n_words]."""
        n_rows = line[ROOM_ROWS]
        return carray(words_at(line[CODES] + h * n_rows * n_words * word_bytes), (n_rows, n_words))

    return packed_codes if packed else codes
