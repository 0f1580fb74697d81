"""Centroids, turns and queries as int16, for scans before RoPE.

A scan multiplies a centroid by a turn, keeps the upper 16 of 31 bits, multiplies by the query and adds in int32. A sum
of products is at most the product of the two norms (Cauchy and Schwarz), and turns change no norm, so `CENTROID_NORM`
times `QUERY_NORM`, a little below 2**31, keeps every sum in range, whichever pairs it is over, at any phase; that
sums on the way wrap round is harmless. A pair, as a complex number, is at most `LONGEST_PAIR` long besides, so that its
parts fit into 16 bits at any phase. What roundings do to a score is a thousandth of what coding does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.aligned import aligned

CENTROID_NORM = 63_000
QUERY_NORM = 33_400
LONGEST_PAIR = 32_000
LARGEST_TURN = 32_767


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
    exact = centroids.astype(np.float64)
    longest = np.hypot(*np.split(exact, 2, axis=-1)).max(axis=-1)
    step = np.maximum(longest / LONGEST_PAIR, np.linalg.norm(exact, axis=-1) / CENTROID_NORM)
    step[step == 0] = 1.0
    table = np.rint(exact / step[..., None]).astype(np.int16)
    return ShortCentroids(aligned(table), (step * (2.0**15 / LARGEST_TURN)).astype(np.float32))


def short_turns(turns: npt.NDArray[np.float64], gain: float) -> npt.NDArray[np.int16]:
    """Return cosines and sines of at most `gain` as int16 of at most `LARGEST_TURN`."""
    return aligned(np.rint(turns * (LARGEST_TURN / gain)).astype(np.int16))
