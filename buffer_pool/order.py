"""Choosing the few smallest of many without sorting all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def smallest(values: npt.NDArray[Any], n: int) -> IntArray:
    """Return where the n smallest of values [m] are, ascending; values differ. O(m + n log n)."""
    if n < len(values):
        part = np.argpartition(values, n)[:n]
        return part[values[part].argsort()]
    return values.argsort()


def smallest_by(values: npt.NDArray[Any], ages: IntArray, n: int) -> IntArray:
    """The same where values repeat: among equals those of the smallest age, int64 [m], come first; ages differ.

    >>> smallest_by(np.array([2.0, 1.0, 2.0, 2.0]), np.array([7, 9, 8, 6]), 3).tolist()
    [1, 3, 0]
    """
    if 0 < n < len(values):
        limit = np.partition(values, n - 1)[n - 1]
        below, equal = np.flatnonzero(values < limit), np.flatnonzero(values == limit)
        part = np.concatenate([below, equal[smallest(ages[equal], n - len(below))]])
    else:
        part = np.arange(len(values))[: n or 0]
    return part[np.lexsort((ages[part], values[part]))]
