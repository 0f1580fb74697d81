"""Queries that ask for a quality instead of a number of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore.config import StoreConfig
from kvstore.table_index import TableIndex
from kvstore.topk import (
    AnyRows,
    FloatArray,
    Query,
    Scored,
    TopK,
    best_of,
    exact_scores,
    find_top_k,
    log_sum_exp,
    score_candidates,
    softmax_weights,
)

FIRST_K = 256
GROWTH = 4
"""Rows asked for at first, then four times as many, until they are enough: a handful of scans at most. Not fewer at
first, since an index proposes a multiple of them, and what it does not propose is not found."""

SAMPLE_ROWS = 1024
"""Rows that stand for all those which the index did not propose, where their mass has to be known."""


def find_mass(table: AnyRows, keeper: TableIndex, config: StoreConfig, query: Query, head: int, mass: float) -> TopK:
    """The fewest rows of one KV head that hold this share of the softmax mass, mean over the group; best first.

    The share is exact for an exact query. With an index the mass of the rows that it did not propose is estimated from
    the exact scores of an even sample of them: its own scores are means, and the exp of a mean is too small.
    """
    length = query.stop - query.start
    k = min(FIRST_K, length)
    while True:
        scored = score_candidates(table, keeper, config, replace(query, k=k, reduce="sum_softmax"))
        if not scored.exact:
            scored = replace(scored, log_norm=_sampled_log_norm(table, scored, query))
        best = best_of(scored, softmax_weights(scored, query), k)
        held = np.cumsum(best.scores[head].numpy(), dtype=np.float64) / query.q.shape[1]
        if held[-1] >= mass or k == length:
            count = min(int(np.searchsorted(held, mass)) + 1, k)
            return TopK(best.positions[head, :count], best.scores[head, :count], best.exact)
        k = min(GROWTH * k, length)


def _sampled_log_norm(table: AnyRows, scored: Scored, query: Query) -> FloatArray:
    """Log of the softmax's denominator: the scored rows, and for the rest a sample, float32 [n_kv_heads, group]."""
    every = np.arange(query.start, query.stop)
    rest = np.stack([np.setdiff1d(every, rows, assume_unique=True) for rows in scored.rows])
    n_rest = rest.shape[1]
    known = log_sum_exp(query.scale * scored.scores)
    if n_rest == 0:
        return known
    n = min(SAMPLE_ROWS, n_rest)
    sample = exact_scores(table, rest[:, np.arange(n) * n_rest // n], query.q)
    return np.asarray(np.logaddexp(known, log_sum_exp(query.scale * sample) + np.log(n_rest / n)), np.float32)


def find_range(table: AnyRows, keeper: TableIndex, config: StoreConfig, query: Query, head: int, beta: float) -> TopK:
    """All rows of one KV head whose inner product is within beta of the largest, best first (one query head)."""
    length = query.stop - query.start
    k = min(FIRST_K, length)
    while True:
        best = find_top_k(table, keeper, config, replace(query, k=k))
        scores = best.scores[head]
        count = int((scores >= scores[0] - beta).sum())
        if count < k or k == length:
            return TopK(best.positions[head, :count], scores[:count], best.exact)
        k = min(GROWTH * k, length)
