"""The last part of every search: scores of one KV head in, chosen rows out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kvstore.index.fast_exp import fast_exp
from kvstore.index.jit import jit
from kvstore.index.reduce import SUM_SOFTMAX, reduce_group_into
from kvstore.index.select import select_top_k


@jit(parallel=True)
def rank_heads(
    scores: Any, scale: Any, reduction: Any, k: Any, first_row: Any, places: Any,
    rows: Any, picked: Any, log_norm: Any,
) -> Any:  # fmt: skip
    """Reduce the scores of each KV head's group and pick its k best rows, heads in parallel.

    scores: float32 [n_kv_heads, group + 1, n], C-order, overwritten; the last line of a head is scratch.
    first_row: row id of column 0. places: int32 [n_kv_heads, >= n + 1], scratch. scale: float. 1 <= k <= n.
    rows: int64 [n_kv_heads, k], picked: float32 [n_kv_heads, k], log_norm: float32 [n_kv_heads, group]: out.
    """
    for h in prange(scores.shape[0]):
        group = scores.shape[1] - 1
        rank_head(
            scores[h, :group], np.float32(scale), reduction, k, first_row, places[h], scores[h, group],
            rows[h], picked[h], log_norm[h],
        )  # fmt: skip


@jit
def rank_head(
    scores: Any, scale: Any, reduction: Any, k: Any, first_row: Any, places: Any, values: Any,
    rows: Any, picked: Any, log_norm: Any,
) -> Any:  # fmt: skip
    """`rank_heads` for one KV head: scores float32 [group, n], values float32 [n], scratch as places are."""
    if scores.shape[0] == 1 and reduction == SUM_SOFTMAX:
        # Softmax keeps the order: choose by the score, which cannot underflow.
        select_top_k(scores[0], k, places, values, rows, picked)
        reduce_group_into(scores, scale, reduction, values, log_norm)
        for i in range(k):
            picked[i] = fast_exp(scale * picked[i] - log_norm[0])
    else:
        reduce_group_into(scores, scale, reduction, values, log_norm)
        select_top_k(scores[0], k, places, values, rows, picked)
    for i in range(k):
        rows[i] += first_row


@jit
def all_finite(x: Any) -> Any:
    """Whether a float32 array [a, b, c] holds neither NaN nor infinity; branch-free inside."""
    a, b, c = x.shape
    zero = np.float32(0.0)
    total = zero
    for i in range(a):
        for j in range(b):
            row = x[i, j]
            for d in range(c):
                total += abs(row[d] - row[d])  # NaN for NaN and for infinity, else zero
    return total == zero
