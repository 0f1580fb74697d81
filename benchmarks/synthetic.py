"""Synthetic keys and queries that look like a model's: where a benchmark needs more rows than a trace has.

They are synthetic: before RoPE the keys of a head lie in clusters of very unequal sizes, neighbouring tokens often in
the same one, and a few channels are much larger than the rest; RoPE then turns them, as it does in a model. Queries
point at clusters. Times depend little on the numbers; recall of synthetic rows says less than recall on traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstore import RopeSpec

FloatArray = npt.NDArray[np.float32]

THETA = 500_000.0
N_CLUSTERS = 512
MEAN_RUN = 6  # tokens in a row of one cluster
_CHUNK = 8192


@dataclass(frozen=True)
class Rows:
    """Keys after RoPE, float32 [n_kv_heads, n, head_dim], position = row, and queries of the next position.

    q: float32 [n_kv_heads, group, head_dim], after RoPE. rope: what turned both.
    """

    keys: FloatArray
    q: FloatArray
    rope: RopeSpec


def make_rows(n_kv_heads: int, n: int, head_dim: int, group: int = 4, seed: int = 0) -> Rows:
    """Return rows of these sizes; the same seed gives the same rows. O(n * n_kv_heads * head_dim)."""
    from kvstore import RopeSpec

    rope = RopeSpec.from_theta(THETA, head_dim)
    keys = np.empty((n_kv_heads, n, head_dim), np.float32)
    q = np.empty((n_kv_heads, group, head_dim), np.float32)
    for h in range(n_kv_heads):
        random = np.random.default_rng([seed, h])
        centers = random.standard_normal((N_CLUSTERS, head_dim), np.float32)
        large = random.choice(head_dim, max(1, head_dim // 32), replace=False)
        labels = _labels(random, n)
        for low in range(0, n, _CHUNK):
            part = labels[low : low + _CHUNK]
            rows = centers[part] + 0.6 * random.standard_normal((len(part), head_dim), np.float32)
            rows[:, large] += 6.0
            keys[h, low : low + _CHUNK] = _turned(rows, np.arange(low, low + len(part)), rope)
        wanted = centers[random.choice(labels, group)] + 0.8 * random.standard_normal((group, head_dim), np.float32)
        q[h] = _turned(1.2 * wanted, np.full(group, n), rope)
    return Rows(keys, q, rope)


def _labels(random: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """Clusters of n rows, int64 [n]: the r-th is 1 / r as frequent as the first; runs of one cluster."""
    weights = 1.0 / np.arange(1, N_CLUSTERS + 1)
    runs = random.geometric(1.0 / MEAN_RUN, n)
    runs = runs[: int(np.searchsorted(np.cumsum(runs), n)) + 1]
    labels: npt.NDArray[np.int64] = np.repeat(random.choice(N_CLUSTERS, len(runs), p=weights / weights.sum()), runs)
    return labels[:n]


def _turned(rows: FloatArray, positions: npt.NDArray[np.int64], rope: RopeSpec) -> FloatArray:
    angles = np.multiply.outer(positions.astype(np.float64), np.array(rope.inv_freq))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(rows, 2, axis=1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)
