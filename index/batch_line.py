"""What a search of several indexes has to know of each: where the arrays lie that a scan reads."""

from __future__ import annotations

import weakref
from typing import Any

import numpy.typing as npt

from kvstore.index.codebook import Codebook
from kvstore.index.coder import Coder
from kvstore.index.runs import Runs


class BatchLine:
    """Addresses of the arrays of one index; looked up anew only when arrays were replaced.

    It keeps none of them alive: an index that grows, or is trained again, must not hold what it has left.

    Attributes:
        coder: scans all indexes of one `key` together (see `Coder.batch_key`).
        key: the coder's, and the number of KV heads.
        numbers: address and rows of the codes, addresses of offsets and positions of runs, how many runs; address of
            the centroids, how many there are, address of their units (`Coder.batch_centroids`).
    """

    __slots__ = ("_codebook", "_codes", "_offsets", "coder", "key", "numbers")

    def __init__(self, coder: Coder, codes: npt.NDArray[Any], runs: Runs, codebook: Codebook) -> None:
        self._codes, self._offsets, self._codebook = (weakref.ref(x) for x in (codes, runs.offsets, codebook))
        self.coder = coder
        self.key = (coder.batch_key, len(codes))
        self.numbers: tuple[int, ...] = (
            codes.ctypes.data, codes.shape[1], runs.offsets.ctypes.data, runs.positions.ctypes.data, len(runs.offsets),
            *coder.batch_centroids(codebook),
        )  # fmt: skip

    def fits(self, codes: npt.NDArray[Any], runs: Runs, codebook: Codebook | None) -> bool:
        """Whether these are still the arrays that the addresses are of; runs replaces both of its own at once."""
        return self._codes() is codes and self._offsets() is runs.offsets and self._codebook() is codebook
