"""Reading numbers of a table's rows from raw addresses inside kernels.

Rows live in blocks whose addresses come in a `RowView`, in one of three formats. Each load is one or two
instructions, so a loop over the dimensions of a row vectorises as if the row were a float32 array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic as numba_intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()


def intrinsic(definition: Callable[..., Any]) -> Any:
    """Register a function of argument types that returns a signature and a generator of LLVM code."""
    return numba_intrinsic(definition)


def _load(builder: Any, address: Any, index: Any, element: Any, item_bytes: int) -> Any:
    pointer = builder.inttoptr(address, element.as_pointer())
    return builder.load(builder.gep(pointer, [index]), align=item_bytes)


@intrinsic
def load_float32(typing_context: Any, address: Any, index: Any) -> Any:
    """Return number `index` of the float32 row at the int64 `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0], arguments[1], _FLOAT, 4)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def load_float16(typing_context: Any, address: Any, index: Any) -> Any:
    """Return number `index` of the float16 row at the int64 `address`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(_load(builder, arguments[0], arguments[1], _HALF, 2), _FLOAT)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def load_bfloat16(typing_context: Any, address: Any, index: Any) -> Any:
    """Return number `index` of the bfloat16 row at the int64 `address`, as float32.

    bfloat16 is the upper half of a float32: zero-extend, shift, reinterpret.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(_load(builder, arguments[0], arguments[1], _I16, 2), _I32)
        return builder.bitcast(builder.shl(wide, ir.Constant(_I32, 16)), _FLOAT)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def float32_pointer(typing_context: Any, address: Any) -> Any:
    """Return the int64 `address` as a pointer to float32, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _FLOAT.as_pointer())

    return numba.types.CPointer(types.float32)(types.int64), generate


@intrinsic
def load_int64(typing_context: Any, address: Any, index: Any) -> Any:
    """Return number `index` of the int64 array at the int64 `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0], arguments[1], _I64, 8)

    return types.int64(types.int64, types.int64), generate


LOADERS = (load_float32, load_float16, load_bfloat16)
"""By `RowView.dtype_code`."""


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at the int64 `address`, to be read soon; never faults."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def times_power_of_two(typing_context: Any, y: Any, n: Any) -> Any:
    """Return y * 2**n for float32 y and a whole float32 n in [-126, 127]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.add(builder.fptosi(arguments[1], _I32), ir.Constant(_I32, 127))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(_I32, 23)), _FLOAT)
        return builder.fmul(arguments[0], power)

    return types.float32(types.float32, types.float32), generate
