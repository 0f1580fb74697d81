"""Vector code on int16: twice the numbers of float32 in a register, and products that are added exactly."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.index.vectors import I16, I32, host_has, host_lanes, indexes, pointer_at, vector

SHORT_BYTES = 2

_X86_MULTIPLY_HIGH = {32: ("avx512bw", "llvm.x86.avx512.pmul.hr.sw.512"), 16: ("avx2", "llvm.x86.avx2.pmul.hr.sw")}
"""By lanes: what a processor must have, and the instruction, which LLVM does not see in the arithmetic."""

_TO_INTEGER = 1.5 * 2**23
"""Added to a float32 below 2**22 it leaves the number, rounded to even, in the lowest bits."""


def short_lanes() -> int:
    """Return how many int16 a kernel should keep in one value."""
    return 2 * host_lanes()


def shorts(lanes: int) -> Any:
    """Type of `lanes` int16."""
    return ir.VectorType(I16, lanes)


def load_shorts(builder: Any, pointer: Any, lanes: int) -> Any:
    """Load `lanes` int16 from a pointer to int16."""
    return builder.load(builder.bitcast(pointer, shorts(lanes).as_pointer()), align=SHORT_BYTES)


def store_rounded(builder: Any, value: Any, address: Any, offset: int, n: int) -> None:
    """Store the first n of a vector of float32 as int16, `offset` numbers behind an int64 address."""
    lanes = value.type.count
    moved = builder.fadd(value, ir.Constant(vector(lanes), [_TO_INTEGER] * lanes))
    whole = builder.trunc(builder.bitcast(moved, ir.VectorType(I32, lanes)), shorts(lanes))
    if n < lanes:
        whole = builder.shuffle_vector(whole, whole, indexes(list(range(n))))
    pointer = pointer_at(builder, address, offset, I16)
    builder.store(whole, builder.bitcast(pointer, shorts(n).as_pointer()), align=SHORT_BYTES)


def multiply_high(builder: Any, x: Any, y: Any) -> Any:
    """x * y / 2**15, rounded, of int16: one instruction on most machines. Not both may be -2**15."""
    named = _X86_MULTIPLY_HIGH.get(x.type.count)
    if named is not None and host_has(named[0]):
        kind = ir.FunctionType(x.type, [x.type, x.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, named[1]), [x, y])
    wide = ir.VectorType(I32, x.type.count)
    product = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    twice = builder.ashr(product, ir.Constant(wide, [14] * wide.count))
    one = ir.Constant(wide, [1] * wide.count)
    return builder.trunc(builder.ashr(builder.add(twice, one), one), x.type)


def add_products(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """total + x * y, each int32 lane of total getting two neighbours' products: one or two instructions."""
    n = x.type.count
    wide = ir.VectorType(I32, n)
    product = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even, odd = (builder.shuffle_vector(product, product, indexes(list(range(low, n, 2)))) for low in (0, 1))
    return builder.add(total, builder.add(even, odd))
