"""The nearest centroid of a row, as vector code written by hand.

Assigning rows to centroids is nearly all of the cost of K-Means and of encoding. argmin |x - c|^2 is
argmax (x . c - |c|^2 / 2), a matrix product followed by an argmax. Four rows meet two vectors of centroids at
a time, so that eight sums, and then the winners, stay in registers: no score is ever stored.

Each row goes through the same operations in the same order whatever rows come with it. So the code of a row
does not depend on the batch that it came in, nor on threads, which a BLAS would not promise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from kvstore.index.jit import STRICT, jit
from kvstore.index.loads import intrinsic
from kvstore.index.vectors import I32, I64, load_lanes, multiply_add, pointer_at, splat, vector

ROWS = 4
"""Rows a call takes."""

LANES = 16
"""Centroids a vector; LLVM splits it where registers are narrower."""

VECTORS = 2
BLOCK = LANES * VECTORS
"""Centroids are padded to a multiple of this."""

_VECTOR, _INDEXES = vector(LANES), ir.VectorType(I32, LANES)


def padded(n_centroids: int) -> int:
    """Return the number of columns that hold n centroids."""
    return -(-n_centroids // BLOCK) * BLOCK


def columns(centroids: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Lay centroids [..., k, d] out for `nearest`: float32 [..., d, padded(k)] and offsets [..., padded(k)].

    The offset of a centroid is -|c|^2 / 2; of padding it is -inf, which never wins.
    """
    *batch, k, d = centroids.shape
    laid = np.zeros((*batch, d, padded(k)), np.float32)
    offsets = np.full((*batch, padded(k)), -np.inf, np.float32)
    for place in np.ndindex(*batch):
        lay_out(centroids[place], laid[place], offsets[place])
    return laid, offsets


@jit(fastmath=STRICT)
def lay_out(centroids: Any, laid: Any, offsets: Any) -> Any:
    """Write centroids float32 [k, d] into the first k columns of laid [d, >= k] and offsets [>= k]."""
    k, d = centroids.shape
    for j in range(k):
        square = 0.0
        for i in range(d):
            x = centroids[j, i]
            laid[i, j] = x
            square += np.float64(x) * x
        offsets[j] = np.float32(-0.5 * square)


@jit
def nearest(rows: Any, first: Any, laid: Any, offsets: Any, indexes: Any, products: Any) -> Any:
    """Find the nearest centroid of rows[first : first + 4]; fewer at the end of the array.

    rows: float32 [n, d], lines may be apart. laid, offsets: from `columns`, float32 [d, padded(k)], [padded(k)].
    indexes: int32 [4], out, the lower of equals. products: float32 [4], out, x . c - |c|^2 / 2 of the winner.
    """
    base = rows.ctypes.data
    last, stride = rows.shape[0] - 1, rows.strides[0]
    _nearest_four(
        base + min(first, last) * stride, base + min(first + 1, last) * stride,
        base + min(first + 2, last) * stride, base + min(first + 3, last) * stride,
        laid.ctypes.data, offsets.ctypes.data, laid.shape[0], laid.shape[1],
        indexes.ctypes.data, products.ctypes.data,
    )  # fmt: skip


@intrinsic
def _nearest_four(
    typing_context: Any, x0: Any, x1: Any, x2: Any, x3: Any, laid: Any, offsets: Any, d: Any, k: Any,
    indexes: Any, products: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Write the LLVM code of a call."""
        *addresses, d, k, indexes, products = arguments
        pointers = [pointer_at(builder, address) for address in addresses]
        best, winner = _scan_centroids(builder, pointers[:ROWS], pointers[4], pointers[5], d, k)
        indexes = builder.inttoptr(indexes, I32.as_pointer())
        products = pointer_at(builder, products)
        for r in range(ROWS):
            value, index = _across_lanes(builder, best[r], winner[r])
            builder.store(value, builder.gep(products, [ir.Constant(I64, r)]))
            builder.store(index, builder.gep(indexes, [ir.Constant(I64, r)]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


def _scan_centroids(builder: Any, rows: Any, laid: Any, offsets: Any, d: Any, k: Any) -> Any:
    """Emit the loop over blocks of centroids; return, a row, its best value and its index in each lane."""
    best = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [-np.inf] * LANES)) for _ in rows]
    winner = [cgutils.alloca_once_value(builder, ir.Constant(_INDEXES, [0] * LANES)) for _ in rows]
    sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(VECTORS)] for _ in rows]
    step = ir.Constant(I64, BLOCK)
    with cgutils.for_range_slice(builder, ir.Constant(I64, 0), k, step, intp=I64) as (block, _):
        for v in range(VECTORS):
            start = _load_block(builder, offsets, block, v)
            for r in range(ROWS):
                builder.store(start, sums[r][v])
        _accumulate(builder, rows, laid, d, k, block, sums)
        for v in range(VECTORS):
            first = builder.trunc(builder.add(block, ir.Constant(I64, v * LANES)), I32)
            numbers = builder.add(splat(builder, first, LANES), ir.Constant(_INDEXES, list(range(LANES))))
            for r in range(ROWS):
                value = builder.load(sums[r][v])
                wins = builder.fcmp_ordered(">", value, builder.load(best[r]))
                builder.store(builder.select(wins, value, builder.load(best[r])), best[r])
                builder.store(builder.select(wins, numbers, builder.load(winner[r])), winner[r])
    return [builder.load(b) for b in best], [builder.load(w) for w in winner]


def _accumulate(builder: Any, rows: Any, laid: Any, d: Any, k: Any, block: Any, sums: Any) -> None:
    """Emit the loop over dimensions: sums[r][v] += rows[r][i] * laid[i, block of v]."""
    with cgutils.for_range(builder, d, intp=I64) as loop:
        offset = builder.add(builder.mul(loop.index, k), block)
        vectors = [_load_block(builder, laid, offset, v) for v in range(VECTORS)]
        for r in range(ROWS):
            x = splat(builder, builder.load(builder.gep(rows[r], [loop.index])), LANES)
            for v in range(VECTORS):
                builder.store(multiply_add(builder, x, vectors[v], builder.load(sums[r][v])), sums[r][v])


def _load_block(builder: Any, pointer: Any, offset: Any, v: int) -> Any:
    """Load vector v of the block of centroids at `offset`."""
    return load_lanes(builder, builder.gep(pointer, [builder.add(offset, ir.Constant(I64, v * LANES))]), LANES)


def _across_lanes(builder: Any, best: Any, winner: Any) -> Any:
    """Emit the argmax over lanes by halves; the lower index wins among equals."""
    width = LANES
    while width > 1:
        width //= 2
        turn = ir.Constant(ir.VectorType(I32, LANES), [(i + width) % LANES for i in range(LANES)])
        value = builder.shuffle_vector(best, best, turn)
        index = builder.shuffle_vector(winner, winner, turn)
        lower = builder.and_(builder.fcmp_ordered("==", value, best), builder.icmp_signed("<", index, winner))
        wins = builder.or_(builder.fcmp_ordered(">", value, best), lower)
        best, winner = builder.select(wins, value, best), builder.select(wins, index, winner)
    first = ir.Constant(I32, 0)
    return builder.extract_element(best, first), builder.extract_element(winner, first)
