"""Who runs K-Means: our kernels, or FAISS as something to compare them with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.index.faiss_library import load_faiss, one_thread

FloatArray = npt.NDArray[np.float32]

NUMBA, FAISS = "numba", "faiss"
TRAINERS = (NUMBA, FAISS)
_WANTED_BY = f"trainer={FAISS!r}"


def checked_trainer(trainer: str) -> str:
    """Return the trainer's name; raises `ConfigError` for an unknown one, and where FAISS is missing."""
    if trainer not in TRAINERS:
        raise ConfigError(f"trainer must be one of {', '.join(map(repr, TRAINERS))}, not {trainer!r}")
    if trainer == FAISS:
        load_faiss(_WANTED_BY)
    return trainer


def faiss_sets(sets: FloatArray, k: int, iterations: int, seed: int, start: FloatArray | None) -> FloatArray:
    """Return centroids float32 [n_sets, k, d] of each set of points, float32 [n_sets, n, d], one set at a time.

    From FAISS' own random points, others a set, or from `start` [n_sets, k, d]. All points are looked at, always
    `iterations` times. The same input and seed give the same bits.
    """
    n_sets, n, d = sets.shape
    if n < k:  # FAISS refuses; every point as often as any other changes no mean
        sets = np.tile(sets, (1, -(-k // n), 1))
    centroids = np.empty((n_sets, k, d), np.float32)
    quiet = {"min_points_per_centroid": 1, "max_points_per_centroid": sets.shape[1]}  # no warning, no second sample
    with one_thread(_WANTED_BY) as faiss:
        for number, points in enumerate(sets):
            clustering = faiss.Kmeans(d, k, niter=iterations, seed=(seed + number) % 2**31, **quiet)
            given = None if start is None else np.ascontiguousarray(start[number])
            clustering.train(np.ascontiguousarray(points), init_centroids=given)
            centroids[number] = clustering.centroids
    return centroids
