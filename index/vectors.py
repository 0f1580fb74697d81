"""Building blocks of vector code: what the kernels written by hand are made of.

Where a loop's stores might alias its loads LLVM guards it with run-time checks, and where a sum is carried through
two loops it reduces in the inner one; both cost more than the arithmetic of a short row. Explicit vectors do not.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I8, I32, I64, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def host_lanes() -> int:
    """Return how many float32 a kernel should keep in one value: 16 with AVX-512, else 8."""
    from llvmlite.binding import get_host_cpu_features

    return 16 if get_host_cpu_features().get("avx512f") else 8


def vector(lanes: int) -> Any:
    """Type of `lanes` float32."""
    return ir.VectorType(FLOAT, lanes)


def indexes(numbers: list[int]) -> Any:
    """Constant vector of int32, for shuffles."""
    return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)


def pointer_at(builder: Any, address: Any, offset: int = 0) -> Any:
    """Pointer to the float32 number `offset` behind an int64 address."""
    pointer = builder.inttoptr(address, FLOAT.as_pointer())
    return builder.gep(pointer, [ir.Constant(I64, offset)]) if offset else pointer


def load_lanes(builder: Any, pointer: Any, lanes: int) -> Any:
    """Load `lanes` float32 from an address that is a multiple of 4."""
    return builder.load(builder.bitcast(pointer, vector(lanes).as_pointer()), align=4)


def store_lanes(builder: Any, value: Any, pointer: Any, lanes: int) -> None:
    """Store the first `lanes` float32 of a vector at an address that is a multiple of 4."""
    if lanes < value.type.count:
        undefined = ir.Constant(value.type, ir.Undefined)
        value = builder.shuffle_vector(value, undefined, indexes(list(range(lanes))))
    builder.store(value, builder.bitcast(pointer, vector(lanes).as_pointer()), align=4)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """Repeat a scalar in all lanes."""
    kind = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, indexes([0] * lanes))


def join(builder: Any, parts: list[tuple[Any, int]], lanes: int) -> Any:
    """Put vectors of the given lengths side by side; lanes left over are zero."""
    whole, filled = ir.Constant(vector(lanes), [0.0] * lanes), 0
    for part, length in parts:
        undefined = ir.Constant(vector(length), ir.Undefined)
        wide = part
        if length < lanes:
            wide = builder.shuffle_vector(part, undefined, indexes([i % length for i in range(lanes)]))
        elif filled == 0:
            return part
        take = [lanes + (i - filled) % lanes if filled <= i < filled + length else i for i in range(lanes)]
        whole = builder.shuffle_vector(whole, wide, indexes(take))
        filled += length
    return whole


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, fused where the machine can."""
    return builder.fadd(builder.fmul(x, y, flags=["contract"]), z, flags=["contract"])


def sum_four(builder: Any, four: list[Any], lanes: int) -> Any:
    """Sums over the lanes of four vectors, as one vector of 4.

    Two vectors are folded into one until all four share one; that takes half the shuffles of four reductions.
    """
    a, b = _fold_two(builder, four[0], four[1], lanes), _fold_two(builder, four[2], four[3], lanes)
    both, width = _fold_two(builder, a, b, lanes, lanes // 2), lanes // 4
    while width > 1:
        width //= 2
        turned = [i ^ width for i in range(lanes)]
        both = builder.fadd(both, builder.shuffle_vector(both, both, indexes(turned)))
    return builder.shuffle_vector(both, both, indexes([i * lanes // 4 for i in range(4)]))


def _fold_two(builder: Any, x: Any, y: Any, lanes: int, width: int | None = None) -> Any:
    """Add the halves of each group of `width` lanes: x's groups, now half as wide, then y's."""
    width = width or lanes
    low = [i for i in range(2 * lanes) if i % width < width // 2]
    high = [i for i in range(2 * lanes) if i % width >= width // 2]
    return builder.fadd(builder.shuffle_vector(x, y, indexes(low)), builder.shuffle_vector(x, y, indexes(high)))
