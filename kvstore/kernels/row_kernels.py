"""Scoring rows and adding up weighted rows, given where each of them begins.

Sizes that are a multiple of 8 get vector code of their own; others share loops that read sizes at run time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvstore.index.flat_kernels import scan_width
from kvstore.index.jit import jit
from kvstore.index.loads import LOADERS, load_int64, prefetch
from kvstore.kernels.row_vectors import ADD_ROWS, DOT_ROWS, add_rows, dot_rows

TILE_ROWS = 64
"""Rows whose weights are worked out together; their addresses and those of the next tile stay in the fastest cache."""

MAX_VECTOR_DIM = 512  # beyond, straight-line code is larger than the processor's instruction cache likes
LINE_BYTES = 64


def vector_dim(dim: int) -> int:
    """Sizes worth a kernel of their own; 0 stands for all others, read at run time."""
    return dim if dim % 8 == 0 and dim <= MAX_VECTOR_DIM else 0


@jit
def row_address(blocks: Any, shift: Any, head_offset: Any, row_stride: Any, row: Any) -> Any:
    """Address of a row: blocks is the address of the table's int64 block addresses, strides are in bytes."""
    mask = (1 << shift) - 1
    return load_int64(blocks, row >> shift) + head_offset + (row & mask) * row_stride


@jit
def list_addresses(blocks: Any, shift: Any, head_offset: Any, row_stride: Any, rows: Any, out: Any) -> Any:
    """Write where rows (int64 [n], n <= a tile) begin to out, int64 [>= n + 3]; the last one again fills a four."""
    n = rows.shape[0]
    for i in range(n):
        out[i] = row_address(blocks, shift, head_offset, row_stride, rows[i])
    for i in range(n, n + (-n) % DOT_ROWS):
        out[i] = out[n - 1]


@jit
def fetch_rows(addresses: Any, start: Any, stop: Any, row_bytes: Any) -> Any:
    """Ask the memory for the rows at addresses[start:stop] before they are needed."""
    for i in range(start, stop):
        for line in range(0, row_bytes, LINE_BYTES):
            prefetch(addresses[i] + line)


@functools.cache
def row_scorer(dim: int, dtype_code: int, group: int) -> Any:
    """Return the kernel for rows of `vector_dim` dim (0: any) and groups of so many query heads.

    `score(addresses, n, ahead, n_ahead, row_bytes, q, at, scores)` writes the products of q, float32 [group, dim],
    with n rows to scores, float32 [group, >= at + n rounded up to fours], C-order, from column `at` on; meanwhile the
    memory is asked for the rows at ahead[:n_ahead]. addresses as `list_addresses` leaves them.
    """
    if dim == 0:
        return _any_scorer(dtype_code)
    width = scan_width(group)
    dot = dot_rows(dim, dtype_code, width)

    @jit
    def score(addresses, n, ahead, n_ahead, row_bytes, q, at, scores):  # type: ignore[no-untyped-def]
        """See `row_scorer`."""
        places, out = addresses.ctypes.data, scores.ctypes.data + at * 4
        query, line, stride = q.ctypes.data, dim * 4, scores.shape[1] * 4
        for t in range(0, n, DOT_ROWS):
            fetch_rows(ahead, t, min(t + DOT_ROWS, n_ahead), row_bytes)
            for start in range(0, group, width):
                g = min(start, group - width)
                dot(places + t * 8, query + g * line, out + g * stride + t * 4, stride)
        fetch_rows(ahead, n, n_ahead, row_bytes)

    return score


def _any_scorer(dtype_code: int) -> Any:
    load = LOADERS[dtype_code]

    @jit
    def score(addresses, n, ahead, n_ahead, row_bytes, q, at, scores):  # type: ignore[no-untyped-def]
        """See `row_scorer`."""
        fetch_rows(ahead, 0, n_ahead, row_bytes)
        for i in range(n):
            for g in range(q.shape[0]):
                line, product = q[g], np.float32(0)
                for d in range(line.shape[0]):
                    product += line[d] * load(addresses[i], d)
                scores[g, at + i] = product

    return score


@functools.cache
def row_adder(dim: int, dtype_code: int, group: int) -> Any:
    """Return the kernel for rows of `vector_dim` dim (0: any) and groups of so many query heads.

    `add(addresses, n, ahead, n_ahead, row_bytes, weights, sums)` adds n rows, each times its weight, float32 [group,
    >= n], to sums, float32 [group, dim]; both C-order. The rest as in `row_scorer`.
    """
    if dim == 0:
        return _any_adder(dtype_code)
    width = scan_width(group)
    left = group % width  # query heads that do not fill a width; of none, vector code is empty
    whole = group - left
    eight, one = (add_rows(dim, dtype_code, width, n) for n in (ADD_ROWS, 1))
    eight_left, one_left = (add_rows(dim, dtype_code, left, n) for n in (ADD_ROWS, 1))

    @jit
    def add(addresses, n, ahead, n_ahead, row_bytes, weights, sums):  # type: ignore[no-untyped-def]
        """See `row_adder`."""
        stride, line, full = weights.shape[1] * 4, dim * 4, n - n % ADD_ROWS
        places, factors, totals = addresses.ctypes.data, weights.ctypes.data, sums.ctypes.data
        for t in range(0, full, ADD_ROWS):
            fetch_rows(ahead, t, min(t + ADD_ROWS, n_ahead), row_bytes)
            for g in range(0, whole, width):
                eight(places + t * 8, factors + g * stride + t * 4, stride, totals + g * line)
            eight_left(places + t * 8, factors + whole * stride + t * 4, stride, totals + whole * line)
        for t in range(full, n):
            for g in range(0, whole, width):
                one(places + t * 8, factors + g * stride + t * 4, stride, totals + g * line)
            one_left(places + t * 8, factors + whole * stride + t * 4, stride, totals + whole * line)
        fetch_rows(ahead, full, n_ahead, row_bytes)

    return add


def _any_adder(dtype_code: int) -> Any:
    load = LOADERS[dtype_code]

    @jit
    def add(addresses, n, ahead, n_ahead, row_bytes, weights, sums):  # type: ignore[no-untyped-def]
        """See `row_adder`."""
        fetch_rows(ahead, 0, n_ahead, row_bytes)
        for i in range(n):
            for g in range(sums.shape[0]):
                factor, total = weights[g, i], sums[g]
                for d in range(total.shape[0]):
                    total[d] += factor * load(addresses[i], d)

    return add
