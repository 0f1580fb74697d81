"""Inner products of coded keys with queries, RoPE's turn included, as vector code."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types

from kvstore.index.loads import intrinsic
from kvstore.index.vectors import (
    FLOAT,
    I8,
    I64,
    host_lanes,
    join,
    load_lanes,
    multiply_add,
    pointer_at,
    store_lanes,
    sum_four,
    vector,
)

ROWS = 4
"""Rows a call scores: the query's numbers are loaded once for all of them."""


@functools.cache
def turned_dot(n_pairs: int, m: int, width: int) -> Any:
    """Return an intrinsic for 4 rows at consecutive positions and `width` query heads, straight-line code.

    `dot(parts, cosines, sines, query, out, stride_bytes)`, all int64 addresses of float32 but the first:
    parts: int64 [4, m], address of each row's centroid in each sub-space: n_pairs real parts, then imaginary.
    cosines, sines: [4, m * n_pairs], the turn of each row. query: [width, 2, m * n_pairs], real, imaginary.
    out: line g, `stride_bytes` after line g - 1, gets 4 numbers: the sum over pairs of
    Re(conj(q_i) c_i (cos_i + 1j sin_i)).
    """

    @intrinsic
    def dot(typing_context: Any, parts: Any, cosines: Any, sines: Any, query: Any, out: Any, stride: Any) -> Any:
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            parts, *rest = arguments
            rows = [_listed_pointers(builder, parts, r, m) for r in range(ROWS)]
            _score_rows(builder, rows, (n_pairs, m, width), *rest)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return dot


@functools.cache
def turned_dot_of_bytes(n_pairs: int, m: int, width: int) -> Any:
    """Return the intrinsic of `turned_dot` for rows whose codes are a byte each, which spares the list of addresses.

    `dot(codes, centroids, k, cosines, sines, query, out, stride_bytes)`: codes: address of uint8 [4, m]; centroids:
    address of float32 [m, k, 2 * n_pairs]; k: an int64; the rest as in `turned_dot`.
    """

    @intrinsic
    def dot(
        typing_context: Any, codes: Any, centroids: Any, k: Any, cosines: Any, sines: Any, query: Any, out: Any,
        stride: Any,
    ) -> Any:  # fmt: skip
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            codes, centroids, k, *rest = arguments
            rows = [_coded_pointers(builder, codes, centroids, k, (r, m, n_pairs)) for r in range(ROWS)]
            _score_rows(builder, rows, (n_pairs, m, width), *rest)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return dot


@functools.cache
def turned_back(pairs: int) -> Any:
    """Return an intrinsic that turns one query head back by a phase, straight-line code.

    `turn(real, imaginary, cosines, sines, out)`, all int64 addresses of float32: [pairs] each, out [2, pairs]:
    (real + 1j imaginary) times the conjugate of (cosines + 1j sines). A loop over so few numbers costs more to set up
    than to run.
    """
    lanes = host_lanes()

    @intrinsic
    def turn(typing_context: Any, real: Any, imaginary: Any, cosines: Any, sines: Any, out: Any) -> Any:
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            *sources, out = arguments
            for low in range(0, pairs, lanes):
                n = min(lanes, pairs - low)
                x, y, c, s = (_load(builder, source, 0, (low, n, lanes)) for source in sources)
                minus = builder.fsub(ir.Constant(vector(lanes), [-0.0] * lanes), x)
                for half, (u, v) in enumerate(((x, y), (y, minus))):
                    place = pointer_at(builder, out, half * pairs + low)
                    store_lanes(builder, _sum_of_products(builder, u, c, v, s), place, n)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return turn


def _sum_of_products(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """a * b + c * d."""
    return multiply_add(builder, a, b, builder.fmul(c, d, flags=["contract"]))


def _score_rows(
    builder: Any, rows: list[list[Any]], sizes: tuple[int, int, int], cosines: Any, sines: Any, query: Any, out: Any,
    stride: Any,
) -> None:  # fmt: skip
    """Score 4 rows; rows[r][j] points to the centroid of row r in sub-space j."""
    n_pairs, m, width = sizes
    lanes, pairs = host_lanes(), m * n_pairs
    sums = [[ir.Constant(vector(lanes), [0.0] * lanes) for _ in range(ROWS)] for _ in range(width)]
    for low in range(0, pairs, lanes):
        span = (low, min(lanes, pairs - low), lanes)
        heads = [[_load(builder, query, (2 * g + half) * pairs, span) for half in (0, 1)] for g in range(width)]
        for r in range(ROWS):
            c, s = _load(builder, cosines, r * pairs, span), _load(builder, sines, r * pairs, span)
            x, y = (_gather(builder, rows[r], n_pairs, half * n_pairs, span) for half in (0, 1))
            real, imaginary = _turn(builder, x, y, c, s)
            for g, (a, b) in enumerate(heads):
                sums[g][r] = multiply_add(builder, b, imaginary, multiply_add(builder, a, real, sums[g][r]))
    _store_sums(builder, sums, out, stride, lanes)


def _turn(builder: Any, x: Any, y: Any, c: Any, s: Any) -> tuple[Any, Any]:
    """(x + 1j y) (c + 1j s)."""
    fused = ["contract"]
    real = builder.fsub(builder.fmul(x, c, flags=fused), builder.fmul(y, s, flags=fused), flags=fused)
    return real, multiply_add(builder, x, s, builder.fmul(y, c, flags=fused))


def _store_sums(builder: Any, sums: list[list[Any]], out: Any, stride: Any, lanes: int) -> None:
    """Store the sum over lanes of each of 4 rows, a line a query head."""
    for g, four in enumerate(sums):
        place = builder.add(out, builder.mul(stride, ir.Constant(I64, g)))
        pointer = builder.inttoptr(place, vector(ROWS).as_pointer())
        builder.store(sum_four(builder, four, lanes), pointer, align=4)


def _listed_pointers(builder: Any, parts: Any, row: int, m: int) -> list[Any]:
    """Load the addresses of a row's centroids."""
    table = builder.inttoptr(parts, I64.as_pointer())
    places = [builder.load(builder.gep(table, [ir.Constant(I64, row * m + j)])) for j in range(m)]
    return [builder.inttoptr(place, FLOAT.as_pointer()) for place in places]


def _coded_pointers(builder: Any, codes: Any, centroids: Any, k: Any, place: tuple[int, int, int]) -> list[Any]:
    """Compute the addresses of a row's centroids from its codes; place = (row, m, n_pairs)."""
    row, m, n_pairs = place
    table = builder.inttoptr(codes, I8.as_pointer())
    base = builder.inttoptr(centroids, FLOAT.as_pointer())
    found = []
    for j in range(m):
        code = builder.zext(builder.load(builder.gep(table, [ir.Constant(I64, row * m + j)])), I64)
        line = builder.add(code, builder.mul(k, ir.Constant(I64, j)))
        found.append(builder.gep(base, [builder.mul(line, ir.Constant(I64, 2 * n_pairs))]))
    return found


def _load(builder: Any, address: Any, offset: int, span: tuple[int, int, int]) -> Any:
    """Load n numbers, the first `low` behind `offset`, for span = (low, n, lanes); lanes left over are zero."""
    low, n, lanes = span
    return join(builder, [(load_lanes(builder, pointer_at(builder, address, offset + low), n), n)], lanes)


def _gather(builder: Any, sources: list[Any], n_pairs: int, shift: int, span: tuple[int, int, int]) -> Any:
    """Load pairs [low, low + n) of a row from the centroids that hold them, `shift` numbers into each."""
    low, n, lanes = span
    parts = []
    while n > 0:
        j, i = divmod(low, n_pairs)
        length = min(n, n_pairs - i)
        pointer = builder.gep(sources[j], [ir.Constant(I64, shift + i)])
        parts.append((load_lanes(builder, pointer, length), length))
        low, n = low + length, n - length
    return join(builder, parts, lanes)
