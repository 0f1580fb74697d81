"""Arrays that begin at a cache line, so that no vector load of a kernel straddles two of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

LINE_BYTES = 64


def empty_aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array, C-order, whose address is a multiple of 64 bytes."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(n_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + n_bytes].view(dtype).reshape(shape)


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of an array, C-order, that begins at a cache line."""
    out = empty_aligned(array.shape, array.dtype)
    out[...] = array
    return out
