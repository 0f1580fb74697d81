"""Exact inner products with keys where they lie, in the blocks of a table."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit
from kvstore.index.loads import LOADERS

MAX_WIDTH = 4
"""Query heads scored together: as many as leave registers for the row."""

_TILE_ROWS = 256  # stay in cache while all query heads of the group are scored


def scan_width(group: int) -> int:
    """Return how many query heads a kernel takes at a time: the group in equal parts of at most `MAX_WIDTH`.

    Where the parts do not fit exactly the last one overlaps the one before and computes a few scores twice.
    """
    parts = -(-group // MAX_WIDTH)
    return -(-group // parts)


@functools.cache
def flat_scan(head_dim: int, width: int, dtype_code: int) -> Any:
    """Return the parallel kernel that scores the rows of all KV heads, compiled for these sizes.

    `scan(addresses, block_tokens, head_stride_bytes, row_stride_bytes, start, stop, column, q, out)`: addresses int64
    [n_blocks]; q float32 [n_kv_heads, group >= width, head_dim]; out float32 [n_kv_heads, >= group,
    >= column + stop - start], written from `column` on.
    """
    score_block = _block_scorer(head_dim, width, LOADERS[dtype_code])

    @jit
    def scan_chunk(addresses, block_tokens, row_stride, head_offset, start, stop, q, out, column):  # type: ignore[no-untyped-def]
        """Rows [start, stop) of a KV head: q float32 [group, head_dim]; out float32 [>= group, n], from `column` on."""
        group = q.shape[0]
        row = start
        while row < stop:
            block = row // block_tokens
            inside = row - block * block_tokens
            n = min(block_tokens - inside, stop - row, _TILE_ROWS)
            base = addresses[block] + head_offset + inside * row_stride
            for g in range(0, group, width):
                score_block(base, row_stride, n, q, min(g, group - width), out, column + row - start)
            row += n

    @jit(parallel=True)
    def scan(addresses, block_tokens, head_stride, row_stride, start, stop, column, q, out):  # type: ignore[no-untyped-def]
        """See `flat_scan`."""
        n_chunks = count_chunks(stop - start)
        for task in prange(q.shape[0] * n_chunks):
            head, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
            low, high = chunk_bounds(stop - start, n_chunks, chunk)
            scan_chunk(
                addresses, block_tokens, row_stride, head * head_stride, start + low, start + high,
                q[head], out[head], column + low,
            )  # fmt: skip

    return scan


def _block_scorer(head_dim: int, width: int, load: Any) -> Any:
    """Return the kernel for rows of one block and `width` query heads: one accumulator a head, one load a number."""

    @jit
    def score_block(base, row_stride, n, q, g, out, column):  # type: ignore[no-untyped-def]
        """n rows from address `base` on and query heads [g, g + width) of q float32 [group, head_dim]; out as above."""
        q0, q1, q2, q3 = q[g], q[g + min(1, width - 1)], q[g + min(2, width - 1)], q[g + width - 1]
        for t in range(n):
            address = base + t * row_stride
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(head_dim):
                x = load(address, d)
                s0 += q0[d] * x
                if width > 1:
                    s1 += q1[d] * x
                if width > 2:
                    s2 += q2[d] * x
                if width > 3:
                    s3 += q3[d] * x
            out[g, column + t] = s0
            if width > 1:
                out[g + 1, column + t] = s1
            if width > 2:
                out[g + 2, column + t] = s2
            if width > 3:
                out[g + 3, column + t] = s3

    return score_block
