"""What an index should answer, in plain float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.rope import RopeSpec


def inner_products(q: Any, keys: Any) -> Any:
    """float64 [heads, group, n] of q [heads, group, d] and keys [heads, n, d]."""
    return np.asarray(q, np.float64) @ np.swapaxes(np.asarray(keys, np.float64), 1, 2)


def largest_product(q: Any, keys: Any) -> float:
    """|q| |key| of the longest query head and key: what the 16 bits of a scan before RoPE are a fraction of."""
    lengths = [np.sqrt(np.square(np.asarray(x, np.float64)).sum(-1).max()) for x in (q, keys)]
    return float(lengths[0] * lengths[1])


def log_sum_exp(x: Any) -> Any:
    """Over the last axis."""
    top = x.max(-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(x - top).sum(-1))


def group_scores(scores: Any, scale: float, reduce: str) -> Any:
    """[heads, n] of scores [heads, group, n]."""
    if reduce == "max":
        return scores.max(1)
    if reduce == "mean":
        return scores.mean(1)
    return np.exp(scale * scores - log_sum_exp(scale * scores)[..., None]).sum(1)


def top_rows(weights: Any, k: int) -> Any:
    """Row numbers of the k largest, ascending; ties go to the lower row."""
    return np.sort(np.lexsort((np.arange(len(weights)), -weights))[:k])


def assert_top(rows: Any, weights: Any, k: int, tolerance: float) -> None:
    """Check that rows are k best ones, up to rows whose weights differ from the k-th by rounding only."""
    k = min(k, len(weights))
    assert rows.shape == (k,)
    assert (np.diff(rows) > 0).all()
    if k == 0:
        return
    kth = np.sort(weights)[-k]
    margin = tolerance * max(abs(kth), np.abs(weights).max() * 1e-3)
    chosen = np.zeros(len(weights), bool)
    chosen[rows] = True
    assert chosen[weights > kth + margin].all(), "a better row was left out"
    assert not chosen[weights < kth - margin].any(), "a worse row was chosen"


def rotate(keys: Any, positions: Any, rope: RopeSpec) -> Any:
    """Apply RoPE to keys [..., n, d] at positions [n], as a model does: float64."""
    keys = np.array(keys, np.float64)
    n_pairs = len(rope.inv_freq)
    if rope.layout == "half":
        first, second = np.arange(n_pairs), np.arange(n_pairs) + n_pairs
    else:
        first, second = 2 * np.arange(n_pairs), 2 * np.arange(n_pairs) + 1
    turn = np.exp(1j * np.outer(positions, rope.inv_freq)) * rope.attention_factor
    pairs = (keys[..., first] + 1j * keys[..., second]) * turn
    keys[..., first], keys[..., second] = pairs.real, pairs.imag
    return keys


def nearest_centroids(points: Any, centroids: Any) -> Any:
    """Squared distances float64 [n, k]."""
    points, centroids = np.asarray(points, np.float64), np.asarray(centroids, np.float64)
    return ((points[:, None] - centroids[None]) ** 2).sum(-1)


def normal(*shape: int, seed: int = 0) -> Any:
    """Standard normal float32."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
