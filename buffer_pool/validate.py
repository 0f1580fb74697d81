"""Checks of what callers pass to a pool; each returns plain arrays or raises before anything has changed."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

from kvstore.buffer_pool.errors import FrameStateError, InvalidBatchError
from kvstore.errors import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def as_size(name: str, value: int, least: int, error: type[Exception] = ConfigError) -> int:
    """Return value as an int; raises error when it is none or below least."""
    try:
        size = operator.index(value)
    except TypeError:
        raise error(f"{name} must be a whole number, not {value!r}") from None
    if size < least:
        raise error(f"{name} must be at least {least}, not {size}")
    return size


def as_ids(ids: npt.ArrayLike) -> IntArray:
    """Return block ids as int64 [n]; raises `InvalidBatchError` for other shapes and what int64 cannot hold."""
    return _as_int64("block ids", ids, InvalidBatchError)


def as_unique_ids(ids: npt.ArrayLike) -> IntArray:
    """The same where each id may occur once."""
    array = as_ids(ids)
    if has_repeats(array):
        raise InvalidBatchError(
            f"block ids must differ from each other: {len(array)} ids, {len(np.unique(array))} blocks"
        )
    return array


def as_weights(name: str, weights: npt.ArrayLike, n: int) -> FloatArray:
    """Return float64 [n], from one number or n; raises `InvalidBatchError` when one is negative or not finite."""
    try:
        array = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise InvalidBatchError(f"{name} must be numbers, not {weights!r}") from None
    if array.shape not in ((), (n,)):
        raise InvalidBatchError(
            f"{name} must be one number or as many as there are blocks ({n}), not of shape {array.shape}"
        )
    if not ((array >= 0) & (array < np.inf)).all():
        raise InvalidBatchError(f"{name} must be finite and not negative; the smallest is {array.min()}")
    return array if array.shape else np.full(n, float(array))


def as_frames(frames: npt.ArrayLike, n_frames: int) -> IntArray:
    """Return frames as int64 [n]; raises `FrameStateError` for those outside [0, n_frames)."""
    array = _as_int64("frames", frames, FrameStateError)
    if len(array) and not (array.min() >= 0 and array.max() < n_frames):
        raise FrameStateError(f"frames must be in [0, {n_frames}); these are in [{array.min()}, {array.max()}]")
    return array


def as_found(frames: npt.ArrayLike, n_frames: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Split what a lookup returned: the frames, int64 [m], and where they were, bool [n], false for -1."""
    array = _as_int64("frames", frames, FrameStateError)
    is_found = array != -1
    return as_frames(array[is_found], n_frames), is_found


def has_repeats(array: IntArray) -> bool:
    """Whether a value occurs twice. O(n log n)."""
    ordered = np.sort(array)
    return bool((ordered[1:] == ordered[:-1]).any())


def _as_int64(name: str, values: npt.ArrayLike, error: type[ValueError]) -> IntArray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise error(f"{name} must be whole numbers in one dimension, not {values!r}") from None
    if array.ndim != 1:
        raise error(f"{name} must be in one dimension, not of shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.can_cast(array.dtype, np.int64) or array.dtype == np.bool_:
        raise error(f"{name} must be whole numbers that int64 can hold, not {array.dtype}")
    return array.astype(np.int64, copy=False)
