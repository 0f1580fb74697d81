"""Lloyd's algorithm on one set of points."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.jit import STRICT, jit
from kvstore.index.nearest import BLOCK, ROWS, lay_out, nearest

_SPLIT = np.float32(1.0 / 1024)


@jit(fastmath=STRICT)
def lloyd(points: Any, centroids: Any, iterations: Any) -> Any:
    """Move centroids, float32 [k, d], in place, to the means of the points, float32 [n, d], nearest to them.

    Stops after `iterations` updates, or when the objective (sum of squared distances) falls no further. Returns
    the objective less sum of |x|^2, float64, as of the last assignment. Sums are float64 and in the order of the
    points: the result is a function of the input alone. O(iterations * n * k * d). (Lloyd 1982.)
    """
    k, d = centroids.shape
    width = -(-k // BLOCK) * BLOCK
    laid = np.zeros((d, width), np.float32)
    offsets = np.full(width, np.float32(-np.inf))
    sums = np.empty((k, d), np.float64)
    counts = np.empty(k, np.int64)
    objective = np.inf
    for _ in range(iterations):
        lay_out(centroids, laid, offsets)
        before, objective = objective, _assign_and_sum(points, laid, offsets, sums, counts)
        if objective >= before:
            break
        _move(centroids, sums, counts)
    return objective


@jit(fastmath=STRICT)
def _assign_and_sum(points: Any, laid: Any, offsets: Any, sums: Any, counts: Any) -> Any:
    """Fill sums [k, d] and counts [k] of the points nearest to each centroid; return the objective."""
    n, d = points.shape
    indexes = np.empty(ROWS, np.int32)
    products = np.empty(ROWS, np.float32)
    sums[:] = 0.0
    counts[:] = 0
    objective = 0.0
    for first in range(0, n, ROWS):
        nearest(points, first, laid, offsets, indexes, products)
        for r in range(min(ROWS, n - first)):
            j = indexes[r]
            counts[j] += 1
            objective -= 2.0 * products[r]
            line, point = sums[j], points[first + r]
            for i in range(d):
                line[i] += point[i]
    return objective


@jit(fastmath=STRICT)
def _move(centroids: Any, sums: Any, counts: Any) -> Any:
    """Set each centroid to its mean; an empty one takes half of the largest cluster.

    The donor stays at its mean, so the objective cannot rise; the newcomer sits beside it, a little off in each
    dimension, and the next assignment divides the points between the two.
    """
    k, d = centroids.shape
    for j in range(k):
        if counts[j] > 0:
            for i in range(d):
                centroids[j, i] = np.float32(sums[j, i] / counts[j])
    for j in range(k):
        if counts[j] == 0:
            donor = np.argmax(counts)
            for i in range(d):
                sign = _SPLIT if i % 2 == 0 else -_SPLIT
                centroids[j, i] = centroids[donor, i] * (np.float32(1.0) + sign)
            counts[j] = counts[donor] // 2
            counts[donor] -= counts[j]
