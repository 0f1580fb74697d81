"""Scores of keys that were coded as they are stored: look-ups in a table of inner products."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.layout import Layout
from kvstore.index.packed_kernels import BLOCK_ROWS, read_words

_TILE_ROWS = 2048
"""Rows whose words are taken apart at once; they stay in the first-level cache while each query head looks them up."""


@functools.cache
def raw_scan(m: int, bits: int, per_word: int, packed: bool) -> Any:
    """Return the parallel kernel that scores rows of all KV heads, compiled for these sizes.

    `scan(codes, laid, order, start, stop, q, tables, out)`: codes uint8 or uint16 [n_kv_heads, >= stop,
    n_words], or where `packed` the blocks of `PackedRows`; laid float32 [n_kv_heads, m, sub_dim, >= k]; order int64
    [head_dim]; start, stop: rows of codes; q float32 [n_kv_heads, group, head_dim]; tables float32 [n_kv_heads, group,
    `table_size`], scratch; out float32 [n_kv_heads, >= group, >= stop - start].
    The score is the sum over words of one look-up (asymmetric distance computation, Jegou et al. 2011, eq. 13,
    for inner products).
    """
    fill_tables = table_filler(m, bits, per_word)
    score_rows = (packed_scorer if packed else row_scorer)(-(-m // per_word), bits * per_word)

    @jit(parallel=True)
    def scan(codes, laid, order, start, stop, q, tables, out):  # type: ignore[no-untyped-def]
        """See `raw_scan`."""
        n_heads, group, _ = q.shape
        n_chunks = count_chunks(stop - start)
        for task in prange(n_heads * group):
            h, g = divmod(np.int64(task), group)
            fill_tables(laid[h], order, q[h, g], tables[h, g])
        for task in prange(n_heads * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            score_rows(codes[h], start + low, start + high, tables[h], out[h], low)

    return scan


def table_size(layout: Layout) -> int:
    """Return how many products of one query head a scan looks up: one for each value of each word."""
    return layout.n_words << (layout.bits * layout.per_word)


@functools.cache
def table_filler(m: int, bits: int, per_word: int) -> Any:
    """Return the kernel that multiplies one query head with all that a word can mean."""
    size = 1 << (bits * per_word)

    @jit
    def fill_tables(laid, order, q, tables):  # type: ignore[no-untyped-def]
        """laid, order and q of one KV head and query head; tables float32 [n_words * size], out."""
        sub_dim, k = laid.shape[1], min(laid.shape[2], 1 << bits)
        products = np.zeros(1 << bits, np.float32)
        tables[:] = 0.0
        for j in range(m):
            products[:] = 0.0
            for i in range(sub_dim):
                x, line = q[order[j * sub_dim + i]], laid[j, i]
                for c in range(k):
                    products[c] += x * line[c]
            filled = 1 << (bits * (j % per_word))
            table = tables[(j // per_word) * size : (j // per_word + 1) * size]
            for c in range((1 << bits) - 1, -1, -1):  # downwards: the first part is the source of all others
                x = products[c]
                part = table[c * filled : (c + 1) * filled]
                for i in range(filled):
                    part[i] = table[i] + x

    return fill_tables


@functools.cache
def row_scorer(n_words: int, word_bits: int) -> Any:
    """Return the kernel for rows [start, stop) of one KV head whose words lie side by side, [>= stop, n_words]."""
    size = 1 << word_bits

    @jit
    def score_rows(codes, start, stop, tables, out, column):  # type: ignore[no-untyped-def]
        """tables float32 [group, n_words * size]; out float32 [>= group, n], from `column` on."""
        for g in range(tables.shape[0]):
            look_up(codes[start:stop], tables[g], out[g, column : column + stop - start])

    @jit
    def look_up(codes, table, out):  # type: ignore[no-untyped-def]
        """out[t] = sum over w of table[w * size + codes[t, w]]."""
        for t in range(out.shape[0]):
            total = np.float32(0.0)
            for w in range(n_words):
                total += table[w * size + np.int64(codes[t, w])]
            out[t] = total

    return score_rows


@functools.cache
def packed_scorer(n_words: int, word_bits: int) -> Any:
    """Return the kernel for rows [start, stop) of one KV head in blocks of 12-bit words.

    A tile of words is taken apart once and looked up for each query head: that costs about what it saves.
    """
    tile_blocks, size = _TILE_ROWS // BLOCK_ROWS, 1 << word_bits

    @jit
    def score_rows(blocks, start, stop, tables, out, column):  # type: ignore[no-untyped-def]
        """Shapes as for `row_scorer`, blocks as for `read_words`."""
        words = np.empty((n_words, _TILE_ROWS), np.uint16)  # made here, so seen not to overlap `out`: a tenth faster
        last = -(-stop // BLOCK_ROWS)
        for block in range(start // BLOCK_ROWS, last, tile_blocks):
            count = min(tile_blocks, last - block)
            read_words(blocks, block, count, words)
            first = block * BLOCK_ROWS
            low, high = max(start, first), min(stop, first + count * BLOCK_ROWS)
            for g in range(tables.shape[0]):
                place = column + low - start
                look_up(words[:, low - first : high - first], tables[g], out[g, place : place + high - low])

    @jit
    def look_up(words, table, out):  # type: ignore[no-untyped-def]
        """out[t] = sum over w of table[w * size + words[w, t]]; words in a slice: seen to be dense it gets slower."""
        for t in range(out.shape[0]):
            total = np.float32(0.0)
            for w in range(n_words):
                total += table[w * size + np.int64(words[w, t])]
            out[t] = total

    return score_rows
