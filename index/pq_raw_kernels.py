"""Scores of keys that were coded as they are stored: look-ups in a table of inner products."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit


@functools.cache
def raw_scan(m: int, bits: int, per_word: int) -> Any:
    """Return the parallel kernel that scores rows of all KV heads, compiled for these sizes.

    `scan(codes, laid, order, start, stop, q, out)`: codes uint8 or uint16 [n_kv_heads, >= stop, n_words]; laid
    float32 [n_kv_heads, m, sub_dim, >= k]; order int64 [head_dim]; start, stop: offsets into codes;
    q float32 [n_kv_heads, group, head_dim]; out float32 [n_kv_heads, >= group, >= stop - start].
    The score is the sum over words of one look-up (asymmetric distance computation, Jegou et al. 2011, eq. 13,
    for inner products).
    """
    n_words = -(-m // per_word)
    size = 1 << (bits * per_word)
    fill_tables, add_codes = _table_filler(m, bits, per_word, size), _word_scanner(n_words, size)

    @jit(parallel=True)
    def scan(codes, laid, order, start, stop, q, out):  # type: ignore[no-untyped-def]
        n_heads, group, _ = q.shape
        n_chunks = count_chunks(stop - start)
        tables = np.empty((n_heads, group, n_words * size), np.float32)
        for task in prange(n_heads * group):
            h, g = divmod(np.int64(task), group)
            fill_tables(laid[h], order, q[h, g], tables[h, g])
        for task in prange(n_heads * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            for g in range(group):
                add_codes(codes[h, start + low : start + high], tables[h, g], out[h, g, low:high])

    return scan


def _table_filler(m: int, bits: int, per_word: int, size: int) -> Any:
    """Return the kernel that multiplies one query head with all that a word can mean."""

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


def _word_scanner(n_words: int, size: int) -> Any:
    """Return the inner loop: out[t] = sum over w of tables[w * size + codes[t, w]]."""

    @jit
    def add_codes(codes, tables, out):  # type: ignore[no-untyped-def]
        for t in range(codes.shape[0]):
            total = np.float32(0.0)
            for w in range(n_words):
                total += tables[w * size + np.int64(codes[t, w])]
            out[t] = total

    return add_codes
