"""The error that codes would make on keys that the codebook has not seen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def held_out_errors(parts: FloatArray, own: IntArray, counts: IntArray, centroids: FloatArray) -> FloatArray:
    """Return, for each row, its squared error had K-Means been run without it: float32 [n].

    K-Means moves centroids towards its rows, the more the fewer rows a centroid has, so that the error of the rows
    trained on is too good a promise (with a centroid for each row it is 0). Without the row its centroid, the mean of
    c rows, would lie c / (c - 1) times as far away, or would not be there; the row takes that one or the next nearest.

    parts: float32 [n, m, sub_dim], rows arranged as the layout says. own: int64 [n, m], their codes. counts: int64
    [m, k], rows a centroid. centroids: float32 [m, sub_dim, k], as `Codebook.laid`. O(n * k * m * sub_dim).
    """
    n, m, _ = parts.shape
    total = np.zeros(n, np.float32)
    lines = np.arange(n)
    for j in range(m):
        squares = np.square(centroids[j]).sum(axis=0)
        products = np.einsum("nd,dk->nk", parts[:, j], centroids[j])  # small: a BLAS would wake threads for it
        distances = np.square(parts[:, j]).sum(axis=1)[:, None] + squares - 2 * products
        mine = own[:, j]
        alike = counts[j, mine].astype(np.float32)
        stretch = np.square(alike / np.maximum(alike - 1, 1))
        without = np.where(alike > 1, np.maximum(distances[lines, mine], 0) * stretch, np.inf)
        distances[lines, mine] = np.inf
        nearest = np.minimum(without, distances.min(axis=1))
        total += np.where(np.isfinite(nearest), np.maximum(nearest, 0), np.square(parts[:, j]).sum(axis=1))
    return total
