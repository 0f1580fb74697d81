"""Compiling ahead of the first query."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.index.base import Index
from kvstore.index.batch_search import search_batch
from kvstore.index.clustering import kmeans
from kvstore.index.registry import make_index
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import FLOAT32, ITEM_BYTES, RowView
from kvstore.index.workspace import default_workspace

Kinds = Iterable[tuple[str, dict[str, Any]]]

MANY_ROWS = 1024
"""Rows that are coded by the kernels for many; few rows take others."""

_FEW_ROWS = 8
_EVERY_KIND = ("flat", "pq", "sq4", "sq8", "rabitq", "page", "sparq")


def warmup(
    n_kv_heads: int,
    head_dim: int,
    group: int,
    *,
    rope: RopeSpec | None = None,
    dtypes: Sequence[int] = tuple(ITEM_BYTES),
    kinds: Kinds | None = None,
) -> None:
    """Compile, or load from disk, all that indexes of these sizes run: training, adding, and searches for a group of
    query heads and for a single one.

    Args:
        rope: of the keys; it makes "pq" code them before RoPE, as in a store.
        dtypes: codes of `RowView`, for the kinds that read rows as they are stored.
        kinds: names of kinds and their settings; by default every kind of our own with its defaults, "pq" in both
            spaces where there is a rope.

    Takes seconds a kind the first time on a machine, later a fraction of one. Otherwise the first call of each pays.
    Raises what the kinds raise for their settings.
    """
    for name, settings in every_kind(rope) if kinds is None else kinds:
        known = {} if name == "flat" else {"rope": rope}
        _run(make_index(name, n_kv_heads, head_dim, **known, **settings), group, dtypes)
    kmeans(_some_keys(1, _FEW_ROWS, head_dim)[0], 2, iterations=1)


def every_kind(rope: RopeSpec | None) -> list[tuple[str, dict[str, Any]]]:
    """Return each kind of our own with settings that make a difference to what is compiled."""
    in_raw_space = [("pq", {"space": "raw"})] if rope is not None else []
    return [*((name, {}) for name in _EVERY_KIND), *in_raw_space, ("page", {"digest": "mean"})]


def _run(index: Index, group: int, dtypes: Sequence[int]) -> None:
    heads, dim = index.n_kv_heads, index.head_dim
    few, many = _some_keys(heads, _FEW_ROWS, dim), _some_keys(heads, MANY_ROWS, dim)
    index.train(many)
    index.add(few)
    index.add(many)
    for code in dtypes if index.needs_rows else (FLOAT32,):
        rows = np.zeros((heads, index.n_rows, dim * ITEM_BYTES[code]), np.uint8)
        view = _view(rows, dim, code) if index.needs_rows else None
        for width in {1, group}:
            q = _some_keys(heads, width, dim)
            index.search(q, 2, view, scale=1.0)
            index.scores(q, view)
            search_batch(
                [index] * 2, np.stack([q] * 2), [2] * 2, [view] * 2, [(0, index.n_rows)] * 2, scale=1.0,
                workspace=default_workspace(),
            )  # fmt: skip


def _some_keys(n_kv_heads: int, n: int, head_dim: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(n).standard_normal((n_kv_heads, n, head_dim), np.float32)


def _view(rows: npt.NDArray[np.uint8], head_dim: int, dtype_code: int) -> RowView:
    """View bytes [n_kv_heads, n_rows, bytes of a row] as one block of rows of a dtype."""
    n_kv_heads, n_rows, _ = rows.shape
    return RowView(
        block_addresses=np.array([rows.ctypes.data], np.int64),
        n_rows=n_rows,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        block_tokens=n_rows,
        head_stride_bytes=rows.strides[0],
        row_stride_bytes=rows.strides[1],
        dtype_code=dtype_code,
        owner=rows,
    )
