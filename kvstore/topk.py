"""Maximum inner product queries over the rows of one table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.config import StoreConfig
from kvstore.index.flat import FlatIndex
from kvstore.index.threads import run_parallel
from kvstore.kernels.score import score_kernel
from kvstore.paged_rows import PagedRows
from kvstore.table import Table
from kvstore.table_index import TableIndex

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
AnyRows = Table | PagedRows
SCORED_ROWS = 4096
"""Rows scored at a time where they come from the disk."""


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows with the largest scores, best first; equal scores by ascending position.

    Attributes:
        positions: int64 [k] (or [n_kv_heads, k] for all heads), row ids.
        scores: float32, the same shape: inner products for one query, group scores for a group.
        exact: whether every row was scored exactly, so that no better row can be missing.
    """

    positions: torch.Tensor
    scores: torch.Tensor
    exact: bool

    def __len__(self) -> int:
        return int(self.positions.shape[-1])


def nothing_found(n_kv_heads: int | None = None) -> TopK:
    """The answer when there are no rows."""
    shape = (0,) if n_kv_heads is None else (n_kv_heads, 0)
    return TopK(torch.empty(shape, dtype=torch.int64), torch.empty(shape), exact=True)


@dataclass(frozen=True, slots=True)
class Query:
    """One question to a table: which rows of [start, stop) score best.

    Attributes:
        q: float32 [n_kv_heads, group, head_dim].
        k: rows wanted a head, at most stop - start.
        start, stop: the rows asked for.
        scale: softmax scale. reduce: how a group agrees. exact: whether to pass by the index.
    """

    q: FloatArray
    k: int
    start: int
    stop: int
    scale: float
    reduce: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows that may be among the best, with their exact scores.

    Attributes:
        rows: int64 [n_kv_heads, n]; scores: float32 [n_kv_heads, group, n], inner products.
        log_norm: float32 [n_kv_heads, group], log of the softmax's denominator over all rows asked for; of rows that
            were not candidates only the index knows the scores, so with an index this is an estimate.
        exact: whether no better row can be missing.
    """

    rows: IntArray
    scores: FloatArray
    log_norm: FloatArray
    exact: bool


def find_top_k(table: AnyRows, keeper: TableIndex, config: StoreConfig, query: Query) -> TopK:
    """Answer a query: from the index and an exact rerank where the index covers, exactly elsewhere.

    O(n) a head without an index; with one, O(codes) + O(over_fetch * k + rows outside the coverage) exact products.
    """
    scored = score_candidates(table, keeper, config, query)
    return best_of(scored, _group_scores(scored, query), query.k)


def score_candidates(table: AnyRows, keeper: TableIndex, config: StoreConfig, query: Query) -> Scored:
    """Find the rows that may be among the k best and score them exactly."""
    index = keeper.index
    low, high = keeper.overlap(query.start, query.stop)
    if query.exact or index is None or low >= high or query.k >= query.stop - query.start:
        index, low, high = FlatIndex.over(table.key_view(), query.start, query.stop), query.start, query.stop
    k = query.k if index.exact else min(high - low, round(config.index.over_fetch * query.k))
    view = table.key_view() if index.needs_rows else None
    found = index.search(query.q, k, view, scale=query.scale, reduce=query.reduce, start=low, stop=high)
    outside = np.concatenate([np.arange(query.start, low), np.arange(high, query.stop)])
    rows = np.concatenate([found.rows, np.broadcast_to(outside, (len(found.rows), len(outside)))], axis=1)
    scores = exact_scores(table, rows, query.q)
    log_norm = np.logaddexp(found.log_norm, log_sum_exp(query.scale * scores[:, :, k:]))
    return Scored(rows, scores, log_norm, index.exact)


def exact_scores(table: AnyRows, rows: IntArray, q: FloatArray) -> FloatArray:
    """Return q . key for rows int64 [n_kv_heads, n] and q [n_kv_heads, group, head_dim]: [n_kv_heads, group, n]."""
    if isinstance(table, PagedRows) and rows.shape[1] > SCORED_ROWS:
        parts = np.array_split(rows, -(-rows.shape[1] // SCORED_ROWS), axis=1)
        return np.concatenate([exact_scores(table, part, q) for part in parts], axis=2)
    rows = table.place(rows, values=False)
    view = table.key_view()
    n = rows.shape[1]
    scores = np.empty((*q.shape[:2], n + -n % 4), np.float32)
    run_parallel(
        score_kernel(view.head_dim, view.dtype_code, q.shape[1]),
        view.block_addresses,
        view.block_tokens.bit_length() - 1,
        view.head_stride_bytes,
        view.row_stride_bytes,
        np.ascontiguousarray(rows),
        np.ascontiguousarray(q),
        scores,
    )
    return scores[:, :, :n]


def softmax_weights(scored: Scored, query: Query) -> FloatArray:
    """Sum over the group of the softmax over the rows asked for, float32 [n_kv_heads, n]; `group` in all."""
    weights = np.exp(query.scale * scored.scores - scored.log_norm[:, :, None]).sum(axis=1)
    return np.asarray(weights, np.float32)


def best_of(scored: Scored, weights: FloatArray, k: int) -> TopK:
    """The k rows of each head with the largest weights, best first, ties to the lower row."""
    order = np.lexsort((scored.rows, -weights), axis=-1)[:, :k]
    return TopK(
        torch.from_numpy(np.take_along_axis(scored.rows, order, 1)),
        torch.from_numpy(np.take_along_axis(weights, order, 1)),
        scored.exact,
    )


def _group_scores(scored: Scored, query: Query) -> FloatArray:
    if scored.scores.shape[1] == 1:
        return scored.scores[:, 0]
    if query.reduce == "sum_softmax":
        return softmax_weights(scored, query)
    reduced = scored.scores.max(axis=1) if query.reduce == "max" else scored.scores.mean(axis=1)
    return np.asarray(reduced, np.float32)


def log_sum_exp(x: FloatArray) -> FloatArray:
    """Log of the sum of exp over the last axis; -inf where it is empty."""
    return np.asarray(np.logaddexp.reduce(x, axis=-1, initial=-np.inf), np.float32)
