"""How far the numbers of each channel of the keys usually spread."""

from __future__ import annotations

import numpy as np

from kvstore.index.base import FloatArray

_FENCE = 4.0
"""Quartile ranges beyond the quartiles: normal numbers never get there, one key gone astray does."""

_SAMPLE_ROWS = 4096


def usual_range(keys: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the lowest and highest number of each channel, those far outside left out: float32 [n_kv_heads, head_dim].

    keys: float32 [n_kv_heads, n >= 1, head_dim], finite. Far outside is what lies more than 4 quartile ranges beyond
    the quartiles (Tukey's fences, set wide), which are those of at most 4,096 rows; a channel whose quartiles
    coincide has no fences. O(n * head_dim) a KV head.
    """
    sample = keys[:, :: -(-keys.shape[1] // _SAMPLE_ROWS)].astype(np.float64)
    first, third = np.quantile(sample, (0.25, 0.75), axis=1)
    reach = np.where(third > first, _FENCE * (third - first), np.inf)
    low = np.maximum(keys.min(axis=1), first - reach).astype(np.float32)
    high = np.minimum(keys.max(axis=1), third + reach).astype(np.float32)
    return low, high
