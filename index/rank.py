"""The last part of every search: scores of one KV head in, chosen rows out."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.fast_exp import fast_exp
from kvstore.index.jit import jit
from kvstore.index.reduce import SUM_SOFTMAX, reduce_group
from kvstore.index.select import select_top_k


@jit
def rank_rows(
    scores: Any, scale: Any, reduction: Any, k: Any, first_row: Any, places: Any, values: Any,
    rows: Any, picked: Any, log_norm: Any,
) -> Any:  # fmt: skip
    """Reduce the group's scores and pick the k best rows.

    scores: float32 [group, n], overwritten; first_row: row id of scores[:, 0].
    places: int32 [>= n + 1], values: float32 [>= n + 1]: scratch.
    rows: int64 [k], picked: float32 [k], log_norm: float32 [group]: out, k <= n.
    """
    single = scores.shape[0] == 1 and reduction == SUM_SOFTMAX
    if single:  # softmax keeps the order: choose by the score, which does not underflow
        weights = scores[0].copy()
        reduce_group(scores, scale, reduction, log_norm)
        select_top_k(weights, k, places, values, rows, picked)
        for i in range(k):
            picked[i] = fast_exp(scale * picked[i] - log_norm[0])
    else:
        reduce_group(scores, scale, reduction, log_norm)
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
