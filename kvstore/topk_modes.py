"""Queries that ask for a quality instead of a number of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore.config import StoreConfig
from kvstore.table import Table
from kvstore.table_index import TableIndex
from kvstore.topk import Query, TopK, best_of, find_top_k, score_candidates, softmax_weights

FIRST_K = 64
GROWTH = 4
"""Few rows are asked for first, then four times as many, until they are enough: a handful of scans at most."""


def find_mass(table: Table, keeper: TableIndex, config: StoreConfig, query: Query, head: int, mass: float) -> TopK:
    """The fewest rows of one KV head that hold this share of the softmax mass, mean over the group; best first.

    The share is exact for an exact query; with an index the rows it did not propose enter by its own scores.
    """
    length = query.stop - query.start
    k = min(FIRST_K, length)
    while True:
        scored = score_candidates(table, keeper, config, replace(query, k=k, reduce="sum_softmax"))
        best = best_of(scored, softmax_weights(scored, query), k)
        held = np.cumsum(best.scores[head].numpy(), dtype=np.float64) / query.q.shape[1]
        if held[-1] >= mass or k == length:
            count = min(int(np.searchsorted(held, mass)) + 1, k)
            return TopK(best.positions[head, :count], best.scores[head, :count], best.exact)
        k = min(GROWTH * k, length)


def find_range(table: Table, keeper: TableIndex, config: StoreConfig, query: Query, head: int, beta: float) -> TopK:
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
