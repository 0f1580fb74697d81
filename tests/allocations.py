"""How much memory a call takes beside what it gives back."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most memory that one call holds at once, beside what was there before; two calls go before it, to settle.

    Counts Python's and NumPy's memory and arrays that Numba's kernels make, which come from the same place; of torch's
    tensors only those that share NumPy's memory.
    """
    call()
    gc.collect()
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
