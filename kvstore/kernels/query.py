"""Reading a query where it lies: one look at its numbers for all that is done with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvstore.index.jit import STRICT, jit
from kvstore.index.loads import LOADERS


@functools.cache
def query_kernel(dtype_code: int) -> Any:
    """Return the kernel `take(address, strides, scale, plain, scaled) -> bool`: whether all numbers are finite.

    address: of numbers of the dtype; strides: bytes between sequences and heads, a tuple of int; plain float32
    [n_sequences, n_heads, dim], out, the numbers; scaled, the same times `scale`, float32.
    """
    load = LOADERS[dtype_code]

    @jit(fastmath=STRICT)
    def take(address: Any, strides: Any, scale: Any, plain: Any, scaled: Any) -> Any:
        """See `query_kernel`."""
        total, factor = np.float32(0), np.float32(scale)
        for b in range(plain.shape[0]):
            for h in range(plain.shape[1]):
                row, line, other = address + b * strides[0] + h * strides[1], plain[b, h], scaled[b, h]
                for d in range(line.shape[0]):
                    x = load(row, d)
                    line[d] = x
                    other[d] = x * factor
                    total += x - x  # NaN for NaN and for infinity, else zero
        return total == np.float32(0)

    return take
