"""K-Means over many sets of points at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from kvstore.errors import ConfigError, NonFiniteError
from kvstore.index.jit import jit
from kvstore.index.lloyd import lloyd
from kvstore.index.threads import run_parallel
from kvstore.index.trainers import FAISS, NUMBA, checked_trainer, faiss_sets

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def kmeans(
    points: FloatArray,
    k: int,
    *,
    iterations: int = 5,
    sample_per_centroid: int = 256,
    seed: int = 0,
    init: FloatArray | None = None,
    trainer: str = NUMBA,
) -> FloatArray:
    """Return centroids float32 [..., min(k, n), d] of each set of points, float32 [..., n, d].

    Lloyd's algorithm from k distinct points drawn at random, or from `init` [..., k, d]. At most
    `sample_per_centroid * k` points of a set, the same of each, are looked at. The same input and seed give the
    same bits with any number of threads. Sets run in parallel. With `trainer="faiss"` FAISS does it, for comparison.
    Raises `ValueError` for n = 0 or a wrong shape, `NonFiniteError` for NaN or infinity, `ConfigError` for settings
    out of range and where FAISS is missing.
    O(sets * iterations * min(n, sample) * k * d).
    """
    checked_trainer(trainer)
    points = np.asarray(points, np.float32)
    if points.ndim < 2 or 0 in points.shape[-2:]:
        raise ValueError(f"points must be [..., n >= 1, d >= 1], not {list(points.shape)}")
    if k < 1 or iterations < 1 or sample_per_centroid < 1:
        raise ConfigError(
            f"k, iterations and sample_per_centroid must be at least 1, not {k}, {iterations}, {sample_per_centroid}"
        )
    if not np.isfinite(points).all():
        raise NonFiniteError("points hold NaN or infinity; find out where they come from")
    *batch, n, d = points.shape
    k = min(k, n)
    sample = draw_sample(n, sample_per_centroid * k, seed)
    sets = np.ascontiguousarray(points.reshape(-1, n, d)[:, sample])
    start = _checked_init(init, len(sets), k, d) if init is not None else None
    if trainer == FAISS:
        return faiss_sets(sets, k, iterations, seed, start).reshape(*batch, k, d)
    centroids = _drawn(sets, k, seed) if start is None else start
    run_parallel(_lloyd_sets, sets, centroids, iterations)
    return centroids.reshape(*batch, k, d)


def draw_sample(n: int, limit: int, seed: int) -> IntArray:
    """Return int64 [min(n, limit)] distinct row numbers, ascending."""
    if n <= limit:
        return np.arange(n, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(n, limit, replace=False)).astype(np.int64)


def draw_starts(n_sets: int, n: int, k: int, seed: int) -> IntArray:
    """Return int64 [n_sets, k], the points each set starts from: distinct, at random, other ones a set."""
    draws = [np.random.default_rng([seed, number]).choice(n, k, replace=False) for number in range(n_sets)]
    return np.array(draws, np.int64).reshape(n_sets, k)


def _drawn(sets: FloatArray, k: int, seed: int) -> FloatArray:
    n_sets, n, _ = sets.shape
    return np.take_along_axis(sets, draw_starts(n_sets, n, k, seed)[:, :, None], 1)


def _checked_init(init: FloatArray, n_sets: int, k: int, d: int) -> FloatArray:
    start = np.array(init, np.float32).reshape(-1, *np.shape(init)[-2:])
    if start.shape != (n_sets, k, d):
        raise ValueError(f"init must hold {n_sets} sets of [{k}, {d}], not {list(np.shape(init))}")
    if not np.isfinite(start).all():
        raise NonFiniteError("init holds NaN or infinity")
    return start


@jit(parallel=True)
def _lloyd_sets(sets: Any, centroids: Any, iterations: Any) -> Any:
    """`lloyd` for each set: float32 [n_sets, n, d] and [n_sets, k, d], in and out."""
    for number in prange(sets.shape[0]):
        lloyd(sets[number], centroids[number], iterations)
