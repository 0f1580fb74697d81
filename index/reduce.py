"""From the scores of a group of query heads to one weight a row.

The query heads that share a KV head share its rows, so they have to agree on which rows to read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.fast_exp import exp_of_negative
from kvstore.index.jit import jit

SUM_SOFTMAX, MAX, MEAN = 0, 1, 2
REDUCTIONS = {"sum_softmax": SUM_SOFTMAX, "max": MAX, "mean": MEAN}

_LANES = 64  # a running maximum each: as one, it would be a chain of dependent comparisons
_TILE = 2048  # scores of a tile stay in the first-level cache between its maximum and its exponentials


@jit
def reduce_group(scores: Any, scale: Any, reduction: Any, log_norm: Any) -> Any:
    """Turn scores into one weight a row, left in `scores[0]`; the other lines are overwritten.

    scores: float32 [group, n], n >= 1. scale: float32. log_norm: float32 [group], out: the log of the sum
    over rows of exp(scale * score). Reductions: `SUM_SOFTMAX` sums over the group the softmax over rows of
    scale * score (PQCache, arXiv 2407.12820, section 3.2); `MAX` and `MEAN` reduce the scores themselves.
    One exp a score. In place, through one name an array: seen through two, a loop does not vectorise.
    """
    spare = np.empty(0 if reduction == SUM_SOFTMAX else scores.shape[1], np.float32)
    reduce_group_into(scores, scale, reduction, spare, log_norm)


@jit
def reduce_group_into(scores: Any, scale: Any, reduction: Any, spare: Any, log_norm: Any) -> Any:
    """`reduce_group` with scratch of the caller's, float32 [>= n], untouched by `SUM_SOFTMAX`; it may follow scores."""
    group, n = scores.shape
    factors = np.empty((group, (n + _TILE - 1) // _TILE), np.float32)
    for g in range(group):
        line = scores[g]
        if reduction != SUM_SOFTMAX:
            for i in range(n):  # a copy by slices would compile Numba's text of shape errors, for seconds
                spare[i] = line[i]
            line = spare[:n]
        log_norm[g] = _exponentials(line, scale, factors[g])
    if reduction == MAX:
        _largest(scores)
    elif reduction == MEAN:
        factors[:] = np.float32(1.0 / group)
    if reduction != MAX:
        _weighted_sum(scores, factors)


@jit
def maximum(x: Any) -> Any:
    """Largest of a float32 vector, n >= 1; NaN is passed over."""
    n = x.shape[0]
    lanes = np.full(_LANES, np.float32(-np.inf))
    whole = n - n % _LANES
    for low in range(0, whole, _LANES):
        for j in range(_LANES):
            y = x[low + j]
            lanes[j] = y if y > lanes[j] else lanes[j]
    top: Any = np.float32(-np.inf)
    for j in range(_LANES):
        top = max(top, lanes[j])
    for i in range(whole, n):
        top = x[i] if x[i] > top else top
    return top


@jit
def _exponentials(x: Any, scale: Any, factors: Any) -> Any:
    """Replace x by exp(scale * (x - the largest of its tile)); return the log of the sum of exp(scale * x).

    factors: float32 [n_tiles], out: what makes the numbers of a tile the softmax over all of x. So the maximum of a
    tile is found while it is in the first-level cache, and the scores are read once. Sums of a tile are float32, sums
    of tiles float64: the error does not grow with n.
    """
    n = x.shape[0]
    top: Any = np.float32(-np.inf)
    total: Any = 0.0
    for low in range(0, n, _TILE):
        tile = x[low : min(low + _TILE, n)]
        peak = maximum(tile)
        factors[low // _TILE] = peak
        if peak > top:
            total *= np.exp(np.float64(scale) * (np.float64(top) - np.float64(peak)))
            top = peak
        part: Any = np.float32(0.0)
        for i in range(tile.shape[0]):
            e = exp_of_negative(scale * (tile[i] - peak))
            tile[i] = e
            part += e
        total += part * np.exp(np.float64(scale) * (np.float64(peak) - np.float64(top)))
    for j in range(factors.shape[0]):
        factors[j] = np.float32(np.exp(np.float64(scale) * (np.float64(factors[j]) - np.float64(top))) / total)
    return scale * top + np.float32(np.log(total))


@jit
def _weighted_sum(scores: Any, factors: Any) -> Any:
    """Put the sum over g of scores[g] times the factor of its tile, factors [group, n_tiles], into scores[0]."""
    group, n = scores.shape
    for low in range(0, n, _TILE):
        high = min(low + _TILE, n)
        target, factor = scores[0, low:high], factors[0, low // _TILE]
        for i in range(high - low):
            target[i] *= factor
        for g in range(1, group):
            source, factor = scores[g, low:high], factors[g, low // _TILE]
            for i in range(high - low):
                target[i] += source[i] * factor


@jit
def _largest(scores: Any) -> Any:
    """Put the maximum over g of scores[g] into scores[0]."""
    group, n = scores.shape
    target = scores[0]
    for g in range(1, group):
        source = scores[g]
        for i in range(n):
            target[i] = source[i] if source[i] > target[i] else target[i]
