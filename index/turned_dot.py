"""Inner products of coded keys with queries, RoPE's turn included, as vector code on int16.

A product of a centroid and a turn keeps its upper bits, products with the query are added in int32; how large the
numbers may be, so that no sum overflows, `short_codes` says.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types

from kvstore.index.loads import intrinsic
from kvstore.index.short_vectors import (
    add_products,
    load_shorts,
    multiply_high,
    short_lanes,
    store_rounded,
)
from kvstore.index.vectors import (
    FLOAT,
    FLOAT_BYTES,
    I8,
    I16,
    I32,
    I64,
    fold_heads,
    host_lanes,
    indexes,
    join,
    load_lanes,
    multiply_add,
    pointer_at,
    splat,
    store_lanes,
    sum_folded,
    vector,
    zeros,
)

ROWS = 4
"""Rows that are scored together."""


@functools.cache
def turned_dots(n_pairs: int, m: int, width: int) -> Any:
    """Return an intrinsic for fours of rows at consecutive positions and `width` query heads.

    `dots(codes, n, k, centroids, units, cosines, sines, query, scales, out, stride_bytes)`, all int64, all but n, k and
    stride_bytes addresses:
    codes: uint8 [4 n, m], which centroid each row has in each sub-space, of centroids int16 [m, k, 2 * n_pairs], real
    parts first, and units float32 [m, k]. cosines, sines: int16 [4 n, m * n_pairs], the turn of each row. query: int16
    [width, 2, m * n_pairs], real, imaginary. scales: float32 [width].
    out: float32; line g, `stride_bytes` after line g - 1, gets 4 n numbers: scales[g] times the sum over pairs of
    unit * Re(conj(q_i) c_i (cos_i + 1j sin_i)) / 2**15.
    """

    @intrinsic
    def dots(
        typing_context: Any, codes: Any, n: Any, k: Any, centroids: Any, units: Any, cosines: Any, sines: Any,
        query: Any, scales: Any, out: Any, stride: Any,
    ) -> Any:  # fmt: skip
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            codes, n, k, centroids, units, *turns, query, scales, out, stride = arguments
            heads = {span: _load_heads(builder, query, m * n_pairs, width, span) for span in _vectors(n_pairs, m)}
            factors = [
                splat(builder, builder.load(pointer_at(builder, scales, g), align=4), ROWS) for g in range(width)
            ]
            with cgutils.for_range(builder, n, intp=I64) as loop:
                first = builder.mul(loop.index, ir.Constant(I64, ROWS))
                rows = [builder.add(first, ir.Constant(I64, r)) for r in range(ROWS)]
                places = [_row(builder, x, (n_pairs, m), codes, k, centroids, units, *turns) for x in rows]
                sums = [_score_row(builder, place, n_pairs, heads) for place in places]
                line = builder.add(out, builder.mul(first, ir.Constant(I64, FLOAT_BYTES)))
                for total, factor in zip(sum_folded(builder, sums, width), factors, strict=True):
                    pointer = builder.inttoptr(line, vector(ROWS).as_pointer())
                    builder.store(builder.fmul(total, factor), pointer, align=4)
                    line = builder.add(line, stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return dots


@functools.cache
def turned_back(pairs: int, short: bool) -> Any:
    """Return an intrinsic that turns one query head back by a phase, straight-line code.

    `turn(head, cosines, sines, out)`, all int64 addresses: head float32 [2, pairs], real, imaginary; cosines and sines
    float32 [pairs]; out [2, pairs], int16 if `short`, rounded, else float32: the head times the conjugate of the phase.
    A loop over so few numbers costs more to set up than to run.
    """
    lanes = host_lanes()

    @intrinsic
    def turn(typing_context: Any, head: Any, cosines: Any, sines: Any, out: Any) -> Any:
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            head, *phase, out = arguments
            sources = (head, builder.add(head, ir.Constant(I64, FLOAT_BYTES * pairs)), *phase)
            for low in range(0, pairs, lanes):
                n = min(lanes, pairs - low)
                x, y, c, s = (
                    join(builder, [(load_lanes(builder, pointer_at(builder, source, low), n), n)], lanes)
                    for source in sources
                )
                minus = builder.fsub(ir.Constant(vector(lanes), [-0.0] * lanes), x)
                for half, (u, v) in enumerate(((x, y), (y, minus))):
                    store = store_rounded if short else store_lanes
                    store(builder, _sum_of_products(builder, u, c, v, s), out, half * pairs + low, n)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return turn


def _sum_of_products(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """a * b + c * d."""
    return multiply_add(builder, a, b, builder.fmul(c, d, flags=["contract"]))


class _Row(NamedTuple):
    """Pointers to the centroids of a row in each sub-space, their units, pointers to its cosines and sines."""

    centroids: list[Any]
    units: list[Any]
    cosines: Any
    sines: Any


def _row(
    builder: Any, number: Any, sizes: tuple[int, int], codes: Any, k: Any, centroids: Any, units: Any, cosines: Any,
    sines: Any,
) -> _Row:  # fmt: skip
    """Find what belongs to a row."""
    n_pairs, m = sizes
    line = _gep(builder, codes, I8, builder.mul(number, ir.Constant(I64, m)))
    own = []
    for j in range(m):
        code = builder.zext(builder.load(builder.gep(line, [ir.Constant(I64, j)])), I64)
        own.append(builder.add(code, builder.mul(k, ir.Constant(I64, j))))
    turn = builder.mul(number, ir.Constant(I64, m * n_pairs))
    return _Row(
        [_gep(builder, centroids, I16, builder.mul(x, ir.Constant(I64, 2 * n_pairs))) for x in own],
        [builder.load(_gep(builder, units, FLOAT, x), align=FLOAT_BYTES) for x in own],
        _gep(builder, cosines, I16, turn),
        _gep(builder, sines, I16, turn),
    )


def _score_row(builder: Any, row: _Row, n_pairs: int, heads: dict[tuple[int, int], list[Any]]) -> Any:
    """Return the sums of a row with all query heads, folded into one vector of float32."""
    m, lanes, width = len(row.units), host_lanes(), len(next(iter(heads.values())))
    if m == 1:
        totals = [zeros(I32, lanes)] * width
        for span, parts in heads.items():
            totals = _products(builder, row, n_pairs, span, parts, totals)
        whole = builder.sitofp(fold_heads(builder, totals), vector(lanes))
        return builder.fmul(whole, splat(builder, row.units[0], lanes))
    sums = [zeros(FLOAT, lanes)] * width
    for span, parts in heads.items():
        totals = _products(builder, row, n_pairs, span, parts, [zeros(I32, lanes)] * width)
        factors = _units_of_lanes(builder, row.units, n_pairs, *span)
        sums = [
            multiply_add(builder, builder.sitofp(total, start.type), factors, start)
            for total, start in zip(totals, sums, strict=True)
        ]
    return fold_heads(builder, sums)


def _products(
    builder: Any, row: _Row, n_pairs: int, span: tuple[int, int], heads: list[tuple[Any, Any]], totals: list[Any]
) -> list[Any]:
    """Add the products of a vector of pairs with each query head to totals, int32, two pairs a lane."""
    c, s = (_load(builder, table, *span) for table in (row.cosines, row.sines))
    x, y = (_gather(builder, row.centroids, n_pairs, half * n_pairs, *span) for half in (0, 1))
    real, imaginary = _turn(builder, x, y, c, s)
    return [
        add_products(builder, b, imaginary, add_products(builder, a, real, total))
        for (a, b), total in zip(heads, totals, strict=True)
    ]


def _vectors(n_pairs: int, m: int) -> list[tuple[int, int]]:
    """Cut the pairs into vectors: (low, n) of each. A lane adds two neighbours, so those must be of one sub-space."""
    lanes = short_lanes()
    parts = [n_pairs] * m if n_pairs % 2 else [n_pairs * m]
    return [
        (j * n_pairs + low, min(lanes, part - low)) for j, part in enumerate(parts) for low in range(0, part, lanes)
    ]


def _units_of_lanes(builder: Any, own: list[Any], n_pairs: int, low: int, n: int) -> Any:
    """The units of the sub-spaces that the pairs of a vector are of, two pairs a lane."""
    lanes = host_lanes()
    of_lanes = [min(low + 2 * i, low + n - 1) // n_pairs for i in range(lanes)]
    factors = splat(builder, own[of_lanes[0]], lanes)
    for j in sorted(set(of_lanes))[1:]:
        take = [lanes + i if part == j else i for i, part in enumerate(of_lanes)]
        factors = builder.shuffle_vector(factors, splat(builder, own[j], lanes), indexes(take))
    return factors


def _turn(builder: Any, x: Any, y: Any, c: Any, s: Any) -> tuple[Any, Any]:
    """(x + 1j y) (c + 1j s) / 2**15."""
    real = builder.sub(multiply_high(builder, x, c), multiply_high(builder, y, s))
    return real, builder.add(multiply_high(builder, x, s), multiply_high(builder, y, c))


def _load_heads(builder: Any, query: Any, pairs: int, width: int, span: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Load real and imaginary parts of a vector of pairs, of each query head."""
    lines = [pointer_at(builder, query, line * pairs, I16) for line in range(2 * width)]
    parts = [_load(builder, line, *span) for line in lines]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _gep(builder: Any, address: Any, element: Any, index: Any) -> Any:
    """Pointer to a number of a table at an int64 address."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def _load(builder: Any, pointer: Any, low: int, n: int) -> Any:
    """Load n int16, the first `low` behind a pointer; lanes left over are zero."""
    return join(builder, [(load_shorts(builder, builder.gep(pointer, [ir.Constant(I64, low)]), n), n)], short_lanes())


def _gather(builder: Any, sources: list[Any], n_pairs: int, shift: int, low: int, n: int) -> Any:
    """Load pairs [low, low + n) of a row from the centroids that hold them, `shift` numbers into each."""
    parts = []
    while n > 0:
        j, i = divmod(low, n_pairs)
        length = min(n, n_pairs - i)
        pointer = builder.gep(sources[j], [ir.Constant(I64, shift + i)])
        parts.append((load_shorts(builder, pointer, length), length))
        low, n = low + length, n - length
    return join(builder, parts, short_lanes())
