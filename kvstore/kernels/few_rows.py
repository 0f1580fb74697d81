"""Looking at a few new rows and copying them to their block, by address: what each layer of a decode step does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba.core import cgutils, types

from kvstore.index.jit import STRICT, jit
from kvstore.index.loads import LOADERS, intrinsic
from kvstore.index.vectors import I8


@functools.cache
def finite_kernel(dtype_code: int) -> Any:
    """Return the kernel `finite(address, strides, shape) -> bool`: whether all numbers of an array are finite.

    strides: bytes between sequences, heads and rows; shape: n_sequences, n_heads, n_rows, dim, the last dense. Both are
    tuples of int.
    """
    load = LOADERS[dtype_code]

    @jit(fastmath=STRICT)
    def finite(address: Any, strides: Any, shape: Any) -> Any:
        """See `finite_kernel`."""
        total = np.float32(0)
        for b in range(shape[0]):
            for h in range(shape[1]):
                for t in range(shape[2]):
                    row = address + b * strides[0] + h * strides[1] + t * strides[2]
                    for d in range(shape[3]):
                        x = load(row, d)
                        total += x - x  # NaN for NaN and for infinity, else zero
        return total == np.float32(0)

    return finite


@jit
def copy_few_rows(source: Any, strides: Any, home: Any, home_strides: Any, shape: Any) -> Any:
    """Copy rows between memory that does not overlap: both int addresses.

    strides: bytes between heads and rows; shape: n_heads, n_rows, bytes of a row; tuples of int.
    """
    for h in range(shape[0]):
        for t in range(shape[1]):
            target = home + h * home_strides[0] + t * home_strides[1]
            _copy_bytes(target, source + h * strides[0] + t * strides[1], shape[2])


@intrinsic
def _copy_bytes(typing_context: Any, target: Any, source: Any, n_bytes: Any) -> Any:
    """Copy n_bytes between int64 addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Write the LLVM code of a call."""
        target, source, n_bytes = arguments
        pointer = I8.as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), n_bytes, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
