"""Products of rows with queries and weights as vector code, rows where they lie and in the format they have.

A row's numbers are read once for several query heads and never written down as float32.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types

from kvstore.index.loads import intrinsic
from kvstore.index.rows import BFLOAT16, FLOAT16, FLOAT32
from kvstore.index.vectors import FLOAT, I64, host_lanes, load_lanes, multiply_add, splat, sum_four, vector

DOT_ROWS = 4
"""Rows that a call of `dot_rows` scores."""

ADD_ROWS = 8
"""Rows that a call of `add_rows` adds; a sum is loaded and stored once for all of them."""

_ELEMENTS = {FLOAT32: ir.FloatType(), FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16)}
_I32 = ir.IntType(32)


@functools.cache
def dot_rows(dim: int, dtype_code: int, width: int) -> Any:
    """Return an intrinsic for 4 rows of `dim` numbers and `width` query heads, straight-line code.

    `dot(rows, query, out, stride_bytes)`, all int64: rows: address of int64 [4], where each row begins; query: address
    of float32 [width, dim]; out: address of a line that gets 4 float32 products, query head g's `g * stride_bytes` on.
    dim is a multiple of 8.
    """

    @intrinsic
    def dot(typing_context: Any, rows: Any, query: Any, out: Any, stride: Any) -> Any:
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            rows, query, out, stride = arguments
            lanes = _lanes(dim)
            places = _places(builder, rows, DOT_ROWS)
            zero = ir.Constant(vector(lanes), [0.0] * lanes)
            sums = [[zero] * DOT_ROWS for _ in range(width)]
            for low in range(0, dim, lanes):
                heads = [_load(builder, query, g * dim + low, FLOAT32, lanes) for g in range(width)]
                for r, place in enumerate(places):
                    row = _load(builder, place, low, dtype_code, lanes)
                    for g, head in enumerate(heads):
                        sums[g][r] = multiply_add(builder, head, row, sums[g][r])
            for g, four in enumerate(sums):
                place = builder.add(out, builder.mul(stride, ir.Constant(I64, g)))
                pointer = builder.inttoptr(place, vector(DOT_ROWS).as_pointer())
                builder.store(sum_four(builder, four, lanes), pointer, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return dot


@functools.cache
def add_rows(dim: int, dtype_code: int, width: int, n_rows: int) -> Any:
    """Return an intrinsic that adds n_rows weighted rows of `dim` numbers to the sums of `width` query heads.

    `add(rows, weights, stride_bytes, sums)`, all int64: rows: address of int64 [n_rows], where each row begins;
    weights: address of float32 [n_rows], query head g's `g * stride_bytes` on; sums: address of float32 [width, dim].
    dim is a multiple of 8.
    """

    @intrinsic
    def add(typing_context: Any, rows: Any, weights: Any, stride: Any, sums: Any) -> Any:
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            rows, weights, stride, sums = arguments
            lanes = _lanes(dim)
            places = _places(builder, rows, n_rows)
            factors = [_factors(builder, weights, stride, g, n_rows) for g in range(width)]
            for low in range(0, dim, lanes):
                parts = [_load(builder, place, low, dtype_code, lanes) for place in places]
                for g, line in enumerate(factors):
                    target = builder.add(sums, ir.Constant(I64, 4 * (g * dim + low)))
                    pointer = builder.inttoptr(target, FLOAT.as_pointer())
                    total = load_lanes(builder, pointer, lanes)
                    for part, factor in zip(parts, line, strict=True):
                        total = multiply_add(builder, splat(builder, factor, lanes), part, total)
                    builder.store(total, builder.bitcast(pointer, vector(lanes).as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return add


def _lanes(dim: int) -> int:
    """Numbers of a row in one value."""
    return host_lanes() if dim % host_lanes() == 0 else 8


def _places(builder: Any, rows: Any, n_rows: int) -> list[Any]:
    """Load the addresses of rows."""
    table = builder.inttoptr(rows, I64.as_pointer())
    return [builder.load(builder.gep(table, [ir.Constant(I64, r)]), align=8) for r in range(n_rows)]


def _factors(builder: Any, weights: Any, stride: Any, g: int, n_rows: int) -> list[Any]:
    """Load the weights of one query head."""
    line = builder.inttoptr(builder.add(weights, builder.mul(stride, ir.Constant(I64, g))), FLOAT.as_pointer())
    return [builder.load(builder.gep(line, [ir.Constant(I64, r)]), align=4) for r in range(n_rows)]


def _load(builder: Any, address: Any, offset: int, dtype_code: int, lanes: int) -> Any:
    """Load `lanes` numbers of a row, the first `offset` numbers behind the address, as float32."""
    element = _ELEMENTS[dtype_code]
    item_bytes = 4 if dtype_code == FLOAT32 else 2
    place = builder.add(address, ir.Constant(I64, offset * item_bytes))
    raw = builder.load(builder.inttoptr(place, ir.VectorType(element, lanes).as_pointer()), align=item_bytes)
    if dtype_code == FLOAT32:
        return raw
    if dtype_code == FLOAT16:
        return builder.fpext(raw, vector(lanes))
    # bfloat16 is the upper half of a float32: zero-extend, shift, reinterpret.
    wide = builder.zext(raw, ir.VectorType(_I32, lanes))
    shift = ir.Constant(ir.VectorType(_I32, lanes), [16] * lanes)
    return builder.bitcast(builder.shl(wide, shift), vector(lanes))
