"""Advice to the system about memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

HUGE_PAGES = 14
"""Back this memory by pages of 2 MiB where it can be: fewer address translations for rows read here and there."""
POPULATE_WRITE = 23
"""Make all of these pages present now (Linux 5.14)."""


def adviser() -> Callable[[int, int, int], bool] | None:
    """Return a function that gives advice on addresses [start, stop), or None where the system takes none.

    `advise(start, stop, advice)` is about the whole pages in between; it returns whether the system takes the advice.
    """
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
    if madvise is None:
        return None

    def advise(start: int, stop: int, advice: int) -> bool:
        """See `adviser`."""
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        return end <= first or madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice) == 0

    return advise
