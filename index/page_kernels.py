"""Digests of pages of keys: keeping them up to date, and scoring pages by them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit


@jit(parallel=True)
def add_to_bounds(keys: Any, page_tokens: Any, start: Any, low: Any, high: Any) -> Any:
    """Widen the bounds of the pages that the keys come into, from row offset `start` on; KV heads in parallel.

    keys: float32 [n_kv_heads, n, head_dim]. low, high: float32 [n_kv_heads, n_pages, head_dim], smallest and largest
    number of each channel, out; a page is begun by its first row.
    """
    for h in prange(keys.shape[0]):
        for t in range(keys.shape[1]):
            page = (start + t) // page_tokens
            first = page * page_tokens == start + t
            key, least, most = keys[h, t], low[h, page], high[h, page]
            for d in range(keys.shape[2]):
                x = key[d]
                least[d] = x if first or x < least[d] else least[d]
                most[d] = x if first or x > most[d] else most[d]


@jit(parallel=True)
def add_to_sums(keys: Any, page_tokens: Any, start: Any, sums: Any) -> Any:
    """The same for the sum of a page's keys, float32 [n_kv_heads, n_pages, head_dim]; rows are added in their order."""
    for h in prange(keys.shape[0]):
        for t in range(keys.shape[1]):
            page = (start + t) // page_tokens
            first = page * page_tokens == start + t
            key, total = keys[h, t], sums[h, page]
            for d in range(keys.shape[2]):
                total[d] = key[d] + (np.float32(0.0) if first else total[d])


@functools.cache
def page_scan(with_bounds: bool) -> Any:
    """Return the parallel kernel that gives the rows of all KV heads the score of their page.

    `scan(low, high, q, page_tokens, n_rows, start, stop, out)`: start, stop: row offsets below n_rows, the rows
    covered; q float32 [n_kv_heads, group, head_dim]; out float32 [n_kv_heads, >= group, >= stop - start].
    With bounds, a page scores sum over d of max(q_d low_d, q_d high_d); without, q . low / rows of the page, where
    low holds sums and high is not read.
    """
    score_page = _bound if with_bounds else _mean

    @jit
    def score_chunk(low, high, q, page_tokens, n_rows, start, first, last, stop, out):  # type: ignore[no-untyped-def]
        """Pages [first, last) of one KV head, [n_pages, head_dim]; out float32 [>= group, stop - start], their rows."""
        for page in range(first, last):
            count = min(page_tokens, n_rows - page * page_tokens)
            begin, end = max(page * page_tokens, start), min((page + 1) * page_tokens, stop)
            for g in range(q.shape[0]):
                score = score_page(q[g], low[page], high[page], count)
                for t in range(begin - start, end - start):
                    out[g, t] = score

    @jit(parallel=True)
    def scan(low, high, q, page_tokens, n_rows, start, stop, out):  # type: ignore[no-untyped-def]
        first, last = start // page_tokens, (stop - 1) // page_tokens + 1
        n_chunks = min(last - first, count_chunks(stop - start))
        for task in prange(q.shape[0] * n_chunks):
            h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            lower, upper = chunk_bounds(last - first, n_chunks, chunk)
            score_chunk(low[h], high[h], q[h], page_tokens, n_rows, start, first + lower, first + upper, stop, out[h])

    return scan


@jit
def _bound(q: Any, low: Any, high: Any, count: Any) -> Any:
    """Largest q . key between a page's bounds; all float32 [head_dim]."""
    total: Any = np.float32(0.0)
    for d in range(q.shape[0]):
        total += q[d] * (high[d] if q[d] > 0 else low[d])
    return total


@jit
def _mean(q: Any, sums: Any, unused: Any, count: Any) -> Any:
    """q . mean key of a page of `count` rows; q and sums float32 [head_dim]."""
    total: Any = np.float32(0.0)
    for d in range(q.shape[0]):
        total += q[d] * sums[d]
    return total / np.float32(count)
