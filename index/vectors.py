"""Building blocks of vector code: what the kernels written by hand are made of.

Where a loop's stores might alias its loads LLVM guards it with run-time checks, and where a sum is carried through
two loops it reduces in the inner one; both cost more than the arithmetic of a short row. Explicit vectors do not.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, FLOAT_BYTES = ir.FloatType(), 4


def host_lanes() -> int:
    """Return how many float32 a kernel should keep in one value: 16 with AVX-512, else 8."""
    return 16 if host_has("avx512f") else 8


def host_has(feature: str) -> bool:
    """Return whether the processor that kernels are compiled for has a feature, by LLVM's name.

    That is this machine's, unless Numba is told of another (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES).
    """
    from llvmlite.binding import get_host_cpu_features
    from numba import config

    if config.CPU_NAME is None and config.CPU_FEATURES is None:
        return bool(get_host_cpu_features().get(feature))
    return f"+{feature}" in (config.CPU_FEATURES or "").split(",")


def vector(lanes: int) -> Any:
    """Type of `lanes` float32."""
    return ir.VectorType(FLOAT, lanes)


def zeros(element: Any, lanes: int) -> Any:
    """Constant vector of zeros."""
    return ir.Constant(ir.VectorType(element, lanes), [0.0 if element == FLOAT else 0] * lanes)


def indexes(numbers: list[int]) -> Any:
    """Constant vector of int32, for shuffles."""
    return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)


def pointer_at(builder: Any, address: Any, offset: int = 0, element: Any = FLOAT) -> Any:
    """Pointer to the number `offset` behind an int64 address."""
    pointer = builder.inttoptr(address, element.as_pointer())
    return builder.gep(pointer, [ir.Constant(I64, offset)]) if offset else pointer


def load_lanes(builder: Any, pointer: Any, lanes: int) -> Any:
    """Load `lanes` float32 from an address that is a multiple of 4."""
    return builder.load(builder.bitcast(pointer, vector(lanes).as_pointer()), align=4)


def store_lanes(builder: Any, value: Any, address: Any, offset: int, n: int) -> None:
    """Store the first n numbers of a vector of float32, `offset` numbers behind an int64 address."""
    if n < value.type.count:
        value = builder.shuffle_vector(value, value, indexes(list(range(n))))
    pointer = builder.bitcast(pointer_at(builder, address, offset), vector(n).as_pointer())
    builder.store(value, pointer, align=FLOAT_BYTES)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """Repeat a scalar in all lanes."""
    kind = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, indexes([0] * lanes))


def join(builder: Any, parts: list[tuple[Any, int]], lanes: int) -> Any:
    """Put vectors of the given lengths side by side; lanes left over are zero."""
    whole, filled = zeros(parts[0][0].type.element, lanes), 0
    for part, length in parts:
        undefined = ir.Constant(part.type, ir.Undefined)
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
    return sum_folded(builder, four, 1)[0]


def fold_heads(builder: Any, sums: list[Any]) -> Any:
    """Fold at most four vectors, float32 or int32, into one of as many lanes that has a part for each, side by side."""
    width = lanes = sums[0].type.count
    parts = [*sums, zeros(sums[0].type.element, lanes)] if len(sums) == 3 else sums
    while len(parts) > 1:
        parts = [_fold_two(builder, x, y, lanes, width) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        width //= 2
    return parts[0]


def sum_folded(builder: Any, rows: list[Any], n_parts: int) -> list[Any]:
    """Sums over the lanes of each part of four vectors that `fold_heads` made: a vector of 4 for each of n_parts."""
    lanes = rows[0].type.count
    slots = 4 if n_parts == 3 else n_parts
    width = lanes // slots
    a, b = (_fold_two(builder, x, y, lanes, width) for x, y in (rows[:2], rows[2:]))
    if width > 2:
        a = b = _fold_two(builder, a, b, lanes, width // 2)
    width = max(1, width // 4)
    left = width
    while left > 1:
        left //= 2
        a = b = builder.fadd(a, builder.shuffle_vector(a, a, indexes([i ^ left for i in range(lanes)])))
    return [builder.shuffle_vector(a, b, indexes([(slots * r + g) * width for r in range(4)])) for g in range(n_parts)]


def _fold_two(builder: Any, x: Any, y: Any, lanes: int, width: int | None = None) -> Any:
    """Add the halves of each group of `width` lanes: x's groups, now half as wide, then y's."""
    width = width or lanes
    low = [i for i in range(2 * lanes) if i % width < width // 2]
    high = [i for i in range(2 * lanes) if i % width >= width // 2]
    a, b = builder.shuffle_vector(x, y, indexes(low)), builder.shuffle_vector(x, y, indexes(high))
    return builder.fadd(a, b) if x.type.element == FLOAT else builder.add(a, b)
