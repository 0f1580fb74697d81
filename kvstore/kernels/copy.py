"""Copying chosen rows out of an extent."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.jit import jit
from kvstore.kernels.work import KEY_HEAD_BYTES, KEY_ROW_BYTES, SHIFT, VALUE_HEAD_BYTES, VALUE_ROW_BYTES


@jit
def copy_rows(
    extent: Any, first: Any, sizes: Any, rows: Any, order: Any, homes: Any, with_values: Any, scratch: Any
) -> None:
    """Copy the rows of one extent that have a home to their homes in blocks of the same layout.

    extent: uint8 [n_blocks, block bytes], whose first row is `first`; sizes: int64 [7], see `kernels.work`;
    rows: int64 [n_kv_heads, n] ascending, and order, int64 of the same shape, where each stands in homes;
    homes: int64 [n_kv_heads, n], row in scratch, negative for rows that need no copy; scratch: uint8 [n, block bytes],
    out. O(rows copied) and a search a head.
    """
    shift = sizes[SHIFT]
    mask = (1 << shift) - 1
    stop = first + (extent.shape[0] << shift)
    values_at = rows.shape[0] * sizes[KEY_HEAD_BYTES]
    for head in range(rows.shape[0]):
        line = rows[head]
        for j in range(np.searchsorted(line, first), np.searchsorted(line, stop)):
            home = homes[head, order[head, j]]
            if home < 0:
                continue
            row = line[j] - first
            source, target = extent[row >> shift], scratch[home >> shift]
            _copy(source, target, head * sizes[KEY_HEAD_BYTES], sizes[KEY_ROW_BYTES], row & mask, home & mask)
            if with_values:
                offset = values_at + head * sizes[VALUE_HEAD_BYTES]
                _copy(source, target, offset, sizes[VALUE_ROW_BYTES], row & mask, home & mask)


@jit
def _copy(source: Any, target: Any, offset: Any, row_bytes: Any, from_row: Any, to_row: Any) -> None:
    """Copy a row of one head of a block, uint8 [block bytes], to a row of that head in another."""
    low, high = offset + from_row * row_bytes, offset + to_row * row_bytes
    target[high : high + row_bytes] = source[low : low + row_bytes]
