"""How many K-Means iterations fit into the time that a layer computes (PQCache, arXiv 2407.12820, section 3.3).

Clustering s rows in T iterations takes a1 + b1 * s * T seconds, the forward pass of one layer over s tokens
a2 + b2 * s + g2 * s^2. Clustering hides behind it with at most

    T_max = (g2 * s^2 + b2 * s + a2 - a1) / (b1 * s)

iterations. The coefficients are fitted where they are used; none are shipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError

BOUNDS = (1, 25)
"""Iterations at least and at most; quality is flat in T well before the upper one."""

SIZES = (1024, 2048, 4096)
ITERATIONS = (1, 6)
REPEATS = 3


@dataclass(frozen=True, slots=True)
class ClusteringCost:
    """Seconds of K-Means over all KV heads of a layer: start_s + row_s * rows * iterations.

    `limit_rows`: the trainer looks at so many rows at most (0: at all), from where on more rows cost nothing.
    """

    start_s: float
    row_s: float
    limit_rows: int = 0

    def seconds(self, rows: int, iterations: int) -> float:
        """Return the time that clustering takes."""
        return self.start_s + self.row_s * self.looked_at(rows) * iterations

    def looked_at(self, rows: int) -> int:
        """Return the rows that the trainer looks at."""
        return min(rows, self.limit_rows) if self.limit_rows else rows


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Seconds of one layer's forward pass over a prompt: start_s + token_s * tokens + square_s * tokens^2."""

    start_s: float
    token_s: float
    square_s: float

    def seconds(self, tokens: int) -> float:
        """Return the time that one layer takes."""
        return self.start_s + self.token_s * tokens + self.square_s * tokens**2


def max_iterations(
    clustering: ClusteringCost, compute: ComputeCost, rows: int, bounds: tuple[int, int] = BOUNDS
) -> int:
    """Return T_max for so many rows, clipped to bounds (both included); raises `ConfigError` for impossible ones."""
    low, high = bounds
    if not 1 <= low <= high:
        raise ConfigError(f"bounds of iterations must be 1 <= low <= high, not {bounds}")
    if rows < 1:
        return low
    an_iteration = clustering.row_s * clustering.looked_at(rows)
    spare = compute.seconds(rows) - clustering.start_s
    if spare >= high * an_iteration:  # also where an iteration costs nothing
        return high
    return max(low, int(spare / an_iteration)) if spare > 0 else low


def fit_compute(samples: Iterable[tuple[int, float]]) -> ComputeCost:
    """Fit the compute model to (tokens, seconds of one layer) pairs that were measured, at least 3 lengths.

    Least squares of relative errors, so that short prompts count as much as long ones; no coefficient is negative.
    Raises `ConfigError` for fewer lengths or for numbers that are not positive and finite.
    """
    measured = np.array(list(samples), float).reshape(-1, 2)
    _check(measured)
    if len(np.unique(measured[:, 0])) < 3:
        raise ConfigError("the compute model has three coefficients: measure at least 3 prompt lengths")
    s = measured[:, 0]
    return ComputeCost(*_fit(np.stack([np.ones_like(s), s, s**2], 1), measured[:, 1]))


def fit_clustering(
    n_kv_heads: int,
    head_dim: int,
    *,
    sizes: tuple[int, ...] = SIZES,
    iterations: tuple[int, ...] = ITERATIONS,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> ClusteringCost:
    """Fit the clustering model by training a `PQIndex` with these options on random keys, the fastest of `repeats`.

    Raises `ConfigError` where the option is not one of "pq", or sizes or iterations are too few.
    """
    from kvstore.index.pq import PQIndex  # imported late: the models above need no kernels

    if len(set(sizes)) * len(set(iterations)) < 2 or repeats < 1:
        raise ConfigError("two coefficients need at least two different measurements")
    keys = np.random.default_rng(0).standard_normal((n_kv_heads, max(sizes), head_dim)).astype(np.float32)
    PQIndex(n_kv_heads, head_dim, **options, iterations=1).train(keys[:, : min(sizes)])  # compiles
    measured = []
    limit_rows = 0
    for size in sizes:
        for count in iterations:
            index = PQIndex(n_kv_heads, head_dim, **options, iterations=count)
            limit_rows = index.sample_per_centroid * index.layout.n_centroids
            seconds = min(_time(index.train, keys[:, :size], clock) for _ in range(repeats))
            measured.append((min(size, limit_rows) * count, seconds))
    return clustering_of(measured, limit_rows)


def clustering_of(samples: Iterable[tuple[int, float]], limit_rows: int = 0) -> ClusteringCost:
    """Fit the clustering model to (rows * iterations, seconds) pairs; raises `ConfigError` as `fit_compute` does."""
    measured = np.array(list(samples), float).reshape(-1, 2)
    _check(measured)
    work = measured[:, 0]
    if len(np.unique(work)) < 2:
        raise ConfigError("the clustering model has two coefficients: measure at least 2 sizes")
    start_s, row_s = _fit(np.stack([np.ones_like(work), work], 1), measured[:, 1])
    return ClusteringCost(start_s, row_s, limit_rows)


def _time(train: Callable[..., None], keys: npt.NDArray[np.float32], clock: Callable[[], float]) -> float:
    keys = np.ascontiguousarray(keys)
    started = clock()
    train(keys)
    return max(clock() - started, 1e-9)


def _check(measured: npt.NDArray[np.float64]) -> None:
    if not len(measured) or not np.isfinite(measured).all() or (measured <= 0).any():
        raise ConfigError("measurements must be pairs of positive, finite numbers: (tokens, seconds)")


def _fit(columns: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> list[float]:
    """Return non-negative coefficients with the least squared relative error.

    Of each set of columns the plain solution is tried: with three columns that is seven, and it is exact.
    """
    n = columns.shape[1]
    scale = np.abs(columns).max(axis=0)
    weighted, target = columns / scale / y[:, None], np.ones(len(y))
    best, least = np.zeros(n), float(len(y))
    for size in range(1, n + 1):
        for chosen in map(list, combinations(range(n), size)):
            solution = np.linalg.lstsq(weighted[:, chosen], target, rcond=None)[0]
            error = float(np.square(weighted[:, chosen] @ solution - target).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(n), error
                best[chosen] = solution
    return [float(x) for x in best / scale]
