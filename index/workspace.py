"""Memory that searches use and throw away."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.index.aligned import empty_aligned

_SLACK = 8
"""A buffer that must grow gets an eighth more than was asked for: a sequence grows token by token."""


class Workspace(threading.local):
    """Buffers for the scores of one search, kept between calls; each Python thread sees its own.

    Grows to the largest search, 4 bytes * n_kv_heads * (group + 2) * rows. Indexes that are not given one share
    `default_workspace()`, so that a model's layers hold one set of buffers together.
    """

    def __init__(self) -> None:
        self._scores = np.empty(0, np.float32)
        self._places = np.empty(0, np.int32)
        self._named: dict[str, npt.NDArray[Any]] = {}

    def take(self, n_heads: int, group: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return uninitialised scores, float32 [n_heads, group + 1, n], and places, int32 [n_heads, n + 1].

        Both are C-order without gaps: kernels read lines of `scores` as vectors. What was taken before may be
        overwritten.
        """
        n_places = n_heads * (n + 1)
        n_scores = n_heads * (group + 1) * n
        if self._scores.size < n_scores:
            self._scores = np.empty(n_scores + n_scores // _SLACK, np.float32)
        if self._places.size < n_places:
            self._places = np.empty(n_places + n_places // _SLACK, np.int32)
        scores = self._scores[:n_scores].reshape(n_heads, group + 1, n)
        return scores, self._places[:n_places].reshape(n_heads, n + 1)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array, C-order, from a cache line on; what was taken under this name may change."""
        size = math.prod(shape)
        kept = self._named.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._named[name] = empty_aligned((size + size // _SLACK,), dtype)
        return kept[:size].reshape(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held for the calling thread."""
        return int(self._scores.nbytes + self._places.nbytes + sum(array.nbytes for array in self._named.values()))


@functools.cache
def default_workspace() -> Workspace:
    """Return the workspace of indexes that were not given one."""
    return Workspace()
