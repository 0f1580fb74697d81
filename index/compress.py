"""Where the numbers of a vector lie that reach a threshold, one behind the other."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kvstore.index.loads import intrinsic
from kvstore.index.vectors import FLOAT_BYTES, I32, I64, host_has, indexes, load_lanes, pointer_at, splat

LANES = 16
"""Numbers looked at together."""


@intrinsic
def append_reaching(typing_context: Any, scores: Any, first: Any, threshold: Any, places: Any, count: Any) -> Any:
    """Append first + i of those of 16 scores that reach the threshold to places; return count and how many they are.

    scores: int64 address of float32 [16]; places: of int32, written from `count` on, 16 of them; what lies behind those
    appended is of no meaning. NaN reaches nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Write the LLVM code of a call."""
        scores, first, threshold, places, count = arguments
        values = load_lanes(builder, pointer_at(builder, scores), LANES)
        reach = builder.fcmp_ordered(">=", values, splat(builder, threshold, LANES))
        numbers = builder.add(splat(builder, builder.trunc(first, I32), LANES), indexes(list(range(LANES))))
        append = _append_vector if host_has("avx512f") else _append_each
        return append(builder, reach, numbers, places, count)

    return types.int64(types.int64, types.int64, types.float32, types.int64, types.int64), generate


def _append_vector(builder: Any, reach: Any, numbers: Any, places: Any, count: Any) -> Any:
    """Push those that reach together and store the whole vector: one instruction, and a count of bits."""
    name = f"llvm.experimental.vector.compress.v{LANES}i32"
    kind = ir.FunctionType(numbers.type, [numbers.type, reach.type, numbers.type])
    compress = cgutils.get_or_insert_function(builder.module, kind, name)
    together = builder.call(compress, [numbers, reach, ir.Constant(numbers.type, ir.Undefined)])
    place = builder.gep(builder.inttoptr(places, I32.as_pointer()), [count])
    builder.store(together, builder.bitcast(place, numbers.type.as_pointer()), align=FLOAT_BYTES)
    bits = builder.bitcast(reach, ir.IntType(LANES))
    return builder.add(count, builder.zext(builder.ctpop(bits), I64))


def _append_each(builder: Any, reach: Any, numbers: Any, places: Any, count: Any) -> Any:
    """Store each at the end, which moves on if it reaches: no branch to mispredict."""
    table = builder.inttoptr(places, I32.as_pointer())
    for i in range(LANES):
        lane = ir.Constant(I32, i)
        builder.store(builder.extract_element(numbers, lane), builder.gep(table, [count]), align=FLOAT_BYTES)
        count = builder.add(count, builder.zext(builder.extract_element(reach, lane), I64))
    return count
