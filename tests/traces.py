"""Small traces whose keys look like keys: clustered, with a few large channels, turned by RoPE."""

from __future__ import annotations

import numpy as np

from kvstore import RopeSpec
from kvstore.traces import Trace

ROPE = RopeSpec.from_theta(10_000.0, 16)


def rotated(x, positions, rope=ROPE):
    """Rotate float [..., n, head_dim] in the half layout; in float64, as the tests' own reference."""
    angles = np.multiply.outer(np.asarray(positions, np.float64), np.array(rope.inv_freq))
    cos, sin, half = np.cos(angles), np.sin(angles), x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def make_trace(n=400, n_queries=8, heads=2, group=2, seed=0, layer=3, **changes) -> Trace:
    random = np.random.default_rng(seed)
    centers = 2 * random.standard_normal((heads, 24, 16))
    pre = np.stack([c[random.integers(24, size=n)] for c in centers]) + 0.5 * random.standard_normal((heads, n, 16))
    pre[..., 3] += 6
    ask = np.stack([c[random.integers(24, size=(group, n_queries))] for c in centers]).reshape(-1, n_queries, 16)
    fields = {
        "k": rotated(pre, np.arange(n)),
        "k_pre": pre,
        "v": random.standard_normal((heads, n, 16)),
        "q": rotated(1.5 * ask, np.arange(n - n_queries, n)),
        "rope": ROPE,
        "layer": layer,
        "model": "tiny",
    }
    fields |= changes
    arrays = {name: x.astype(np.float16) for name, x in fields.items() if isinstance(x, np.ndarray)}
    return Trace(**(fields | arrays))
