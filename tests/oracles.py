"""What attention and top-k are, in float64 numpy, a row and a head at a time; nothing here is the engine's.

Keys and values come as tensors [n_kv_heads, n, dim] of any dtype, queries as [n_q_heads, head_dim].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Rows = list[int] | np.ndarray[Any, Any]


def wide(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor of any float type as float64."""
    return x.detach().double().numpy()


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, rows: list[Rows] | None = None
) -> Any:
    """Attend with q [n_q_heads, head_dim] to `rows` (a list a KV head; None: all): [n_q_heads, value_dim]."""
    K, V, Q = wide(keys), wide(values), wide(q)
    group = len(Q) // len(K)
    out = np.empty((len(Q), V.shape[2]))
    for j, query in enumerate(Q):
        head = j // group
        at = np.arange(K.shape[1]) if rows is None else np.asarray(rows[head], int)
        out[j] = softmax(scale * (K[head, at] @ query)) @ V[head, at]
    return out


def group_scores(q: torch.Tensor, keys: torch.Tensor, scale: float, reduce: str) -> Any:
    """One score a row: q [group, dim] and keys [n, dim] -> [n]."""
    products = wide(q) @ wide(keys).T
    if reduce == "sum_softmax":
        return softmax(scale * products).sum(axis=0)
    return products.max(axis=0) if reduce == "max" else products.mean(axis=0)


def best(scores: np.ndarray[Any, Any], k: int) -> list[int]:
    """The k largest scores, best first; what is equal goes by the lower row."""
    return sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:k]


def selective_rows(
    q: torch.Tensor, keys: torch.Tensor, scale: float, start: int, stop: int, k: int, reduce: str
) -> list[Rows]:
    """Rows read a KV head when the middle is [start, stop): all outside it, and of it the k with the best scores."""
    n_heads, n, _ = keys.shape
    group = len(q) // n_heads
    lists: list[Rows] = []
    for head in range(n_heads):
        scores = group_scores(q[head * group : (head + 1) * group], keys[head, start:stop], scale, reduce)
        chosen = [start + row for row in best(scores, k)]
        lists.append([*range(start), *sorted(chosen), *range(stop, n)])
    return lists


def mass(q: torch.Tensor, keys: torch.Tensor, scale: float, rows: list[Rows]) -> float:
    """Share of the full softmax that `rows` hold, mean over query heads."""
    K, Q = wide(keys), wide(q)
    group = len(Q) // len(K)
    shares = [softmax(scale * (K[j // group] @ Q[j]))[np.asarray(rows[j // group], int)].sum() for j in range(len(Q))]
    return float(np.mean(shares))


def assert_best_rows(rows: Rows, scores: np.ndarray[Any, Any], k: int, tolerance: float = 1e-5) -> None:
    """`rows` are k different rows, and none that was left out is better by more than rounding."""
    rows = np.asarray(rows, int)
    assert len(rows) == min(k, len(scores))
    assert len(set(rows.tolist())) == len(rows)
    left_out = np.delete(scores, rows)
    if len(left_out) and len(rows):
        slack = tolerance * max(1e-30, np.abs(scores).max())
        assert left_out.max() <= scores[rows].min() + slack
