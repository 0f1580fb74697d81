"""Runs plans: candidates from the index, then one kernel over all sequences and heads."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.config import StoreConfig
from kvstore.index.base import Candidates, Index
from kvstore.index.flat import FlatIndex
from kvstore.index.rows import DTYPE_CODES
from kvstore.index.threads import run_sized
from kvstore.index.workspace import Workspace
from kvstore.kernels.attend import attend_kernel
from kvstore.planner import FLAT, INDEX, Plan
from kvstore.schema import Schema
from kvstore.table import Table
from kvstore.table_index import TableIndex

NUMBER_NS = 0.12
"""Rough nanoseconds for a number of a row and a query head; only whether to wake threads depends on it."""

REDUCE_CODES = {"sum_softmax": 0, "max": 1, "mean": 2}


@dataclass(frozen=True, slots=True)
class Attended:
    """What one layer's attention gave.

    Attributes:
        out: float32 [n_sequences, n_kv_heads, group, value_dim].
        log_norm: float32 [n_sequences, n_kv_heads, group], log of the softmax's denominator over the rows read.
        chosen: int64 [n_sequences, n_kv_heads, >= n_selected], rows picked from the middle, ascending, then -1.
        search_s, attend_s: seconds spent finding candidates, and in rerank + fetch + softmax.
    """

    out: npt.NDArray[np.float32]
    log_norm: npt.NDArray[np.float32]
    chosen: npt.NDArray[np.int64]
    search_s: float
    attend_s: float


class Attention:
    """The attention of a schema: compiled kernels and the sizes they need; holds no rows."""

    def __init__(self, schema: Schema, config: StoreConfig, workspace: Workspace) -> None:
        self._schema = schema
        self._config = config
        self._workspace = workspace
        self._reduce_code = REDUCE_CODES[config.reduce]
        item = schema.torch_dtype.itemsize
        value_bytes = schema.value_dim * item
        self._sizes = np.array(
            [
                schema.block_tokens.bit_length() - 1,
                schema.block_tokens * schema.key_bytes,
                schema.key_bytes,
                schema.block_tokens * value_bytes,
                value_bytes,
                schema.head_dim,
                schema.value_dim,
            ],
            np.int64,
        )

    def run(
        self,
        tables: SequenceABC[Table],
        indexes: SequenceABC[TableIndex],
        plans: SequenceABC[Plan],
        q: npt.NDArray[np.float32],
        scale: float,
    ) -> Attended:
        """Attend with q, float32 [n_sequences, n_kv_heads, group, head_dim], to one table of each sequence."""
        s = self._schema
        started = time.perf_counter()
        found = [
            self._candidates(i, table, keeper, plan, q[i], scale)
            for i, (table, keeper, plan) in enumerate(zip(tables, indexes, plans, strict=True))
        ]
        searched = time.perf_counter()
        candidates = found[0] if len(found) == 1 else _stack(found)
        lines = [
            (
                t.key_addresses.ctypes.data,
                t.value_addresses.ctypes.data,
                p.first,
                p.sinks_stop,
                p.tail_start,
                p.n_rows,
            )
            for t, p in zip(tables, plans, strict=True)
        ]
        n_chosen = max(p.n_selected for p in plans)
        out = np.empty((len(plans), s.n_kv_heads, q.shape[2], s.value_dim), np.float32)
        log_norm = np.empty(out.shape[:3], np.float32)
        chosen = np.full((len(plans), s.n_kv_heads, n_chosen), -1, np.int64)
        counts = [p.by_head or ((p.n_candidates, p.n_selected),) * s.n_kv_heads for p in plans]
        numbers = sum(p.n_attended * s.value_dim + max(p.n_attended, p.n_candidates) * s.head_dim for p in plans)
        run_sized(
            NUMBER_NS * s.n_q_heads * numbers,
            attend_kernel(s.head_dim, s.value_dim, DTYPE_CODES[s.dtype]),
            np.array(lines, np.int64),
            np.array(counts, np.int64),
            self._sizes,
            candidates,
            self._reduce_code,
            q * np.float32(scale),
            out,
            log_norm,
            chosen,
        )
        return Attended(out, log_norm, chosen, searched - started, time.perf_counter() - searched)

    def _candidates(
        self, place: int, table: Table, keeper: TableIndex, plan: Plan, q: npt.NDArray[np.float32], scale: float
    ) -> npt.NDArray[np.int64]:
        """Rows the index proposes, int64 [1, n_kv_heads, n_candidates]."""
        if plan.method == INDEX and keeper.index is not None:
            index: Index = keeper.index
        elif plan.method == FLAT:
            index = FlatIndex.over(table.key_view(), plan.sinks_stop, plan.tail_start, workspace=self._workspace)
        else:
            return np.empty((1, self._schema.n_kv_heads, 0), np.int64)
        found = index.search(
            q,
            plan.n_candidates,
            table.key_view() if index.needs_rows else None,
            scale=scale,
            reduce=self._config.reduce,
            start=plan.sinks_stop,
            stop=plan.tail_start,
            out=self._room(place, q.shape[1], plan.n_candidates),
        )
        return (_best(found, plan.by_head) if plan.by_head else found.rows)[None]

    def _room(self, place: int, group: int, k: int) -> Candidates:
        """Return the workspace's room for the candidates of one sequence of a batch, until the next call."""
        heads, buffer = self._schema.n_kv_heads, self._workspace.buffer
        return Candidates(
            buffer(f"rows {place}", (heads, k), np.int64),
            buffer(f"scores {place}", (heads, k), np.float32),
            buffer("log norms", (heads, group), np.float32),
        )


def _best(found: Candidates, by_head: tuple[tuple[int, int], ...]) -> npt.NDArray[np.int64]:
    """Keep of each KV head's rows as many as it may have, those with the best scores, ascending, at the front."""
    rows = found.rows.copy()
    for head, (n_candidates, _) in enumerate(by_head):
        order = np.lexsort((found.rows[head], -found.scores[head]))[:n_candidates]
        rows[head, : len(order)] = np.sort(found.rows[head, order])
    return rows


def _stack(found: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    width = max(rows.shape[2] for rows in found)
    stacked = np.zeros((len(found), found[0].shape[1], width), np.int64)
    for i, rows in enumerate(found):
        stacked[i, :, : rows.shape[2]] = rows[0]
    return stacked
