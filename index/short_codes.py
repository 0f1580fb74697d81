"""Centroids, turns and queries as int16, for scans before RoPE.

A scan multiplies a centroid by a turn, keeps the upper 16 of 31 bits, multiplies by the query and adds in int32; every
so many numbers the sum goes on in float32. Numbers are scaled as far up as nothing can overflow, whatever the phases: a
pair, as a complex number, is at most `LONGEST_PAIR` long in a centroid, `LARGEST_TURN` in a turn and `LARGEST_QUERY` in
a query. So the product of the three, real and imaginary part together, is below 2**30 once 15 bits are dropped, and the
two pairs that a lane of a vector adds stay below 2**31 in each of `MOST_VECTORS` vectors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.aligned import aligned

LONGEST_PAIR = 32_000
LARGEST_TURN = 32_767
LARGEST_QUERY = 16_350
MOST_VECTORS = 2


class ShortCentroids(NamedTuple):
    """Centroids for a scan.

    Attributes:
        table: int16 [n_kv_heads, m, k, 2 n_pairs].
        units: float32 [n_kv_heads, m, k], of each centroid: what its products stand for. One of its own, so that a
            centroid far from all others does not make them coarse.
    """

    table: npt.NDArray[np.int16]
    units: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.table.nbytes + self.units.nbytes


def short_centroids(centroids: npt.NDArray[np.float32]) -> ShortCentroids:
    """Return centroids float32 [n_kv_heads, m, k, 2 n_pairs], real parts first, as int16."""
    first, second = np.split(centroids.astype(np.float64), 2, axis=-1)
    longest = np.hypot(first, second).max(axis=-1)
    longest[longest == 0] = 1.0
    table = np.rint(centroids * (LONGEST_PAIR / longest)[..., None]).astype(np.int16)
    return ShortCentroids(aligned(table), (longest * (2.0**15 / LONGEST_PAIR / LARGEST_TURN)).astype(np.float32))


def short_turns(turns: npt.NDArray[np.float64], gain: float) -> npt.NDArray[np.int16]:
    """Return cosines and sines of at most `gain` as int16 of at most `LARGEST_TURN`."""
    return aligned(np.rint(turns * (LARGEST_TURN / gain)).astype(np.int16))
