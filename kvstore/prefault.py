"""Having the system clear memory on another core before it is filled."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence

import torch

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STEP_BYTES = 4 << 20  # at a time: the one who fills must not wait for all of it


def prefault(pieces: Sequence[tuple[torch.Tensor, int, int]]) -> threading.Thread | None:
    """Touch bytes [start, stop) of each tensor, uint8 [n], in a thread that ends by itself; their contents stay.

    Memory that was never touched costs a page fault for each 4 KiB of it, two thirds of the time to copy rows there. In
    advance, and many pages a call, it is a third of that, and another core's. None where the system knows no such
    call, or has no thread left.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
    if madvise is None or not pieces:
        return None

    def work() -> None:
        """Go through the pieces; whatever the system refuses will be touched by who fills it."""
        for tensor, start, stop in pieces:
            first = -(-(tensor.data_ptr() + start) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + stop) // mmap.PAGESIZE * mmap.PAGESIZE
            for at in range(first, end, _STEP_BYTES):
                length = min(_STEP_BYTES, end - at)
                if madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
                    return

    thread = threading.Thread(target=work, name="kvstore-prefault", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had: whoever fills the memory touches it first
        return None
    return thread
