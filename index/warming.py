"""Compiling ahead of the first query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.index.clustering import kmeans
from kvstore.index.flat import FlatIndex
from kvstore.index.pq import PQIndex
from kvstore.index.rows import ITEM_BYTES, RowView


def warmup(
    n_kv_heads: int,
    head_dim: int,
    group: int,
    *,
    dtypes: Sequence[int] = tuple(ITEM_BYTES),
    pq: Sequence[dict[str, Any]] = ({},),
) -> None:
    """Compile, or load from disk, what searches of these sizes run: `FlatIndex` for the dtype codes of `RowView`,
    and `PQIndex` for each set of its settings.

    Takes seconds the first time on a machine, later a fraction of one. Otherwise the first call of each kind pays.
    """
    keys = np.ones((n_kv_heads, 8, head_dim), np.float32)
    q = np.ones((n_kv_heads, group, head_dim), np.float32)
    kmeans(keys[0], 2, iterations=1)
    for code in dtypes:
        rows = np.zeros((n_kv_heads, 8, head_dim * ITEM_BYTES[code]), np.uint8)
        view = RowView(
            block_addresses=np.array([rows.ctypes.data], np.int64),
            n_rows=8,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            block_tokens=8,
            head_stride_bytes=rows.strides[0],
            row_stride_bytes=rows.strides[1],
            dtype_code=code,
            owner=rows,
        )
        FlatIndex.over(view, 0, 8).search(q, 2, view, scale=1.0)
    for settings in pq:
        index = PQIndex(n_kv_heads, head_dim, **settings)
        index.train(keys)
        index.add(keys)
        index.add(np.ones((n_kv_heads, 1024, head_dim), np.float32))  # many rows are coded by another kernel
        index.search(q, 2, scale=1.0)
