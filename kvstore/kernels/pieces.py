"""The softmax of attention, piece by piece, and the choice among candidates."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.fast_exp import fast_exp
from kvstore.index.jit import STRICT, jit
from kvstore.index.reduce import reduce_group
from kvstore.index.select import select_top_k
from kvstore.kernels.work import HEAD, PIECE, SEQUENCE


@jit
def pick_rows(scores: Any, n: Any, n_selected: Any, reduce_code: Any, floats: Any, places: Any, picked: Any) -> Any:
    """Write the places of the n_selected candidates with the best group scores, ascending, to picked, int64.

    scores: float32 [group, >= n], scaled, n_selected <= n. Scratch: floats float32 [>= (group + 2) * n + n_selected],
    places int32 [>= n + 1].
    """
    if n_selected == n:
        for i in range(n):
            picked[i] = i
        return
    group = scores.shape[0]
    weights = floats[: group * n].reshape(group, n)  # they are reduced in place, and the softmax wants the scores again
    for g in range(group):
        for i in range(n):
            weights[g, i] = scores[g, i]
    rest = floats[group * n :]
    reduce_group(weights, np.float32(1), reduce_code, rest[:group])
    select_top_k(weights[0], n_selected, places, rest[:n], picked, rest[n:])


@jit(fastmath=STRICT)
def soften(scores: Any, n: Any, peak: Any, norm: Any, sums: Any) -> None:
    """Turn a tile of scores [group, n] into weights in place, for a softmax that goes on tile by tile.

    Online softmax (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3): peak [group] is the largest score so far,
    norm [group] the sum of exp(score - peak), sums [group, dim] the weighted values; a new peak scales both down.
    """
    for g in range(scores.shape[0]):
        line, old = scores[g], peak[g]
        top = old
        for i in range(n):
            top = max(top, line[i])
        if top > old:
            shrink = fast_exp(old - top)
            norm[g] *= shrink
            total = sums[g]
            for d in range(total.shape[0]):
                total[d] *= shrink
            peak[g] = top
        for i in range(n):
            line[i] = fast_exp(line[i] - top)
        norm[g] += _sum(line, n)


@jit(fastmath=STRICT)
def _sum(x: Any, n: Any) -> Any:
    """Sum of x[:n] in an order of its own.

    One that the compiler may choose can be another where a kernel is compiled than where it is loaded from disk: the
    ranks of a model would differ in the last bit.
    """
    whole = n - n % 8
    a = b = c = d = e = f = g = h = np.float32(0)
    for i in range(0, whole, 8):
        a, b, c, d = a + x[i], b + x[i + 1], c + x[i + 2], d + x[i + 3]
        e, f, g, h = e + x[i + 4], f + x[i + 5], g + x[i + 6], h + x[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(whole, n):
        total += x[i]
    return total


@jit
def state_parts(state: Any, group: Any) -> Any:
    """View a piece's state, float32 [group * (value_dim + 2)]: peak [group], norm [group], sums [group, value_dim]."""
    sums = state[2 * group :]
    return state[:group], state[group : 2 * group], sums.reshape(group, sums.shape[0] // group)


@jit(fastmath=STRICT)
def merge_pieces(items: Any, states: Any, out: Any, log_norm: Any) -> None:
    """Merge the pieces of each head by their log-sum-exp: out = sum exp(peak - top) sums / sum exp(peak - top) norm.

    items: int64 [n_items, 3], a head's pieces together; states: of each, see `state_parts`; out float32 [n_sequences,
    n_kv_heads, group, value_dim], log_norm [..., group].
    """
    group, dim = out.shape[2:]
    at = 0
    while at < items.shape[0]:
        stop = at + 1
        while stop < items.shape[0] and items[stop, PIECE] > 0:
            stop += 1
        b, head = items[at, SEQUENCE], items[at, HEAD]
        for g in range(group):
            top = states[at, g]
            for i in range(at + 1, stop):
                top = max(top, states[i, g])
            line = out[b, head, g]
            line[:] = np.float32(0)
            norm = np.float32(0)
            for i in range(at, stop):
                if states[i, group + g] > 0:
                    weight = np.float32(np.exp(states[i, g] - top))
                    norm += weight * states[i, group + g]
                    for d in range(dim):
                        line[d] += weight * states[i, 2 * group + g * dim + d]
            for d in range(dim):
                line[d] /= norm
            log_norm[b, head, g] = top + np.float32(np.log(norm))
        at = stop
