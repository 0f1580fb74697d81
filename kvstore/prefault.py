"""Having the system clear memory on another core before it is filled."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvstore.advice import POPULATE_WRITE, adviser

_STEP_BYTES = 4 << 20  # at a time: the one who fills must not wait for all of it


def prefault(pieces: Sequence[tuple[torch.Tensor, int, int]]) -> threading.Thread | None:
    """Touch bytes [start, stop) of each tensor, uint8 [n], in a thread that ends by itself; their contents stay.

    Memory that was never touched costs a page fault for each 4 KiB of it, two thirds of the time to copy rows there. In
    advance, and many pages a call, it is a third of that, and another core's. None where the system knows no such
    call, or has no thread left.
    """
    advise = adviser()
    if advise is None or not pieces:
        return None

    def work() -> None:
        """Go through the pieces; whatever the system refuses will be touched by who fills it."""
        for tensor, start, stop in pieces:
            first, end = tensor.data_ptr() + start, tensor.data_ptr() + stop
            for at in range(first, end, _STEP_BYTES):
                if not advise(at, min(at + _STEP_BYTES, end), POPULATE_WRITE):
                    return

    thread = threading.Thread(target=work, name="kvstore-prefault", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had: whoever fills the memory touches it first
        return None
    return thread
