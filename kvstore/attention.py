"""Runs plans: candidates from the index, then one kernel over all sequences and heads."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.config import StoreConfig
from kvstore.index.base import Candidates, Index
from kvstore.index.batch_search import search_batch
from kvstore.index.flat import FlatIndex
from kvstore.index.rows import DTYPE_CODES
from kvstore.index.threads import run_sized
from kvstore.index.workspace import Workspace
from kvstore.kernels.attend import attend_kernel
from kvstore.kernels.pieces import merge_pieces
from kvstore.kernels.row_kernels import TILE_ROWS
from kvstore.kernels.work import BY_HEAD, KEPT_ROWS, LIST, PIECE, count_chunks, head_scratch, list_items, row_sizes
from kvstore.paged_rows import PagedRows
from kvstore.planner import DENSE, INDEX, Plan
from kvstore.recorder import Recorder
from kvstore.schema import Schema
from kvstore.table import Table
from kvstore.table_index import TableIndex

NUMBER_NS = 0.12
"""Rough nanoseconds for a number of a row and a query head; only whether to wake threads depends on it."""

REDUCE_CODES = {"sum_softmax": 0, "max": 1, "mean": 2}
AnyRows = Table | PagedRows
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Attended(NamedTuple):
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

    def __init__(self, schema: Schema, config: StoreConfig, workspace: Workspace, recorder: Recorder) -> None:
        self._schema = schema
        self._config = config
        self._workspace = workspace
        self._recorder = recorder
        self._reduce_code = REDUCE_CODES[config.reduce]
        self._sizes = row_sizes(schema)
        self._kernel = attend_kernel(schema.head_dim, schema.value_dim, DTYPE_CODES[schema.dtype], schema.group)

    def run(
        self,
        tables: SequenceABC[AnyRows],
        indexes: SequenceABC[TableIndex],
        plans: SequenceABC[Plan],
        q: FloatArray,
        scaled: FloatArray,
        scale: float,
    ) -> Attended:
        """Attend to one table of each sequence with q, float32 [n_sequences, n_kv_heads, group, head_dim].

        scaled: q times scale. O(n_sequences * rows) for the scan, and what `attend_kernel` says.
        """
        if len(tables) > 1 and any(_kept_away(table, plan) for table, plan in zip(tables, plans, strict=True)):
            # One after the other, so that only one sequence's rows are in place at a time.
            parts = zip(tables, indexes, plans, strict=True)
            return _joined(
                [self.run([t], [x], [p], q[i : i + 1], scaled[i : i + 1], scale) for i, (t, x, p) in enumerate(parts)]
            )
        started = time.perf_counter()
        with self._recorder.span("search", indexes[0].layer):
            found = self._candidates(tables, indexes, plans, q, scale)
        searched = time.perf_counter()
        placed = [table.place(rows) for table, rows in zip(tables, found, strict=True)]
        out, log_norm, chosen = self._attend(tables, plans, placed, scaled)
        for i, (rows, ids) in enumerate(zip(found, placed, strict=True)):
            if ids is not rows:  # some were brought from the disk
                chosen[i] = _row_ids(chosen[i], ids, rows)
        return Attended(out, log_norm, chosen, searched - started, time.perf_counter() - searched)

    def _attend(
        self,
        tables: SequenceABC[AnyRows],
        plans: SequenceABC[Plan],
        candidates: list[IntArray],
        q: FloatArray,
    ) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return out, log_norm and chosen as `Attended` has them, of rows that are in place or can be brought there."""
        s, buffer, n = self._schema, self._workspace.buffer, len(plans)
        lines = [_line(table, plan, s.n_kv_heads) for table, plan in zip(tables, plans, strict=True)]
        items = list_items(tuple(map(_pieces, plans)), tuple(line[BY_HEAD + 1 :: 2] for line in lines))
        placed = candidates[0][None] if n == 1 else _stack(candidates)
        group, n_heads, n_candidates = q.shape[2], n * s.n_kv_heads, placed.shape[2]
        n_selected = max(plan.n_selected for plan in plans)
        floats, ints = head_scratch(group, n_candidates, n_selected)
        n_tasks = max(len(items), n_heads * count_chunks(n_candidates))
        work = _Work(
            np.array(lines, np.int64),
            self._sizes,
            placed,
            self._reduce_code,
            q,
            buffer("floats", (n_heads, floats), np.float32),
            buffer("ints", (n_heads, ints), np.int64),
            buffer("tiles", (n_tasks, group * TILE_ROWS), np.float32),
            buffer("lists", (n_tasks, 2 * LIST), np.int64),
            np.empty((n, s.n_kv_heads, n_selected), np.int64),
            np.empty((n, s.n_kv_heads, group, s.value_dim), np.float32),
            np.empty((n, s.n_kv_heads, group), np.float32),
        )
        states = buffer("states", (len(items), group * (s.value_dim + 2)), np.float32)
        work_ns = NUMBER_NS * s.n_q_heads * sum(_numbers(plan, s) for plan in plans)
        if isinstance(tables[0], PagedRows) and _kept_away(tables[0], plans[0]):
            self._run_parts(tables[0], plans[0], work, items, states, work_ns)
        else:
            self._run(work, items, states, work_ns)
        return work.out, work.log_norm, work.chosen

    def _run_parts(
        self, rows: PagedRows, plan: Plan, work: _Work, items: IntArray, states: FloatArray, work_ns: float
    ) -> None:
        """Run the pieces of one sequence one after the other, those of kept rows each while its rows are in place."""
        n_pieces = _pieces(plan)
        for piece in range(n_pieces + 1):
            mine = items[:, PIECE] == piece if piece < n_pieces else items[:, PIECE] >= piece
            lines = np.ascontiguousarray(items[mine])
            part = np.empty((len(lines), states.shape[1]), np.float32)
            with rows.hold(*_kept_ranges(plan, min(piece, n_pieces - 1))):
                self._run(work, lines, part, work_ns / n_pieces, select=piece == n_pieces, merge=False)
            states[mine] = part
        merge_pieces(items, states, work.out, work.log_norm)

    def _run(
        self, work: _Work, items: IntArray, states: FloatArray, work_ns: float, *, select: bool = True,
        merge: bool = True,
    ) -> None:  # fmt: skip
        lines, sizes, rows, reduce_code, q, floats, ints, tiles, lists, chosen, out, log_norm = work
        run_sized(
            work_ns, self._kernel,
            lines, sizes, rows, reduce_code, q, items, floats, ints, tiles, lists, states, chosen, select, merge, out,
            log_norm,
        )  # fmt: skip

    def _candidates(
        self,
        tables: SequenceABC[AnyRows],
        keepers: SequenceABC[TableIndex],
        plans: SequenceABC[Plan],
        q: FloatArray,
        scale: float,
    ) -> list[IntArray]:
        """Rows the indexes propose, int64 [n_kv_heads, n_candidates] for each sequence, until the next call."""
        found = [np.empty((self._schema.n_kv_heads, 0), np.int64)] * len(plans)
        asked = [i for i, plan in enumerate(plans) if plan.method != DENSE]
        if not asked:
            return found
        indexes = [self._index(tables[i], keepers[i], plans[i]) for i in asked]
        answers = search_batch(
            indexes,
            q if len(asked) == len(plans) else q[asked],
            [plans[i].n_candidates for i in asked],
            [tables[i].key_view() if index.needs_rows else None for i, index in zip(asked, indexes, strict=True)],
            [(plans[i].sinks_stop, plans[i].tail_start) for i in asked],
            scale=scale,
            reduce=self._config.reduce,
            workspace=self._workspace,
        )
        for i, answer in zip(asked, answers, strict=True):
            by_head = plans[i].by_head
            found[i] = _best(answer, by_head) if by_head else answer.rows
        return found

    def _index(self, table: AnyRows, keeper: TableIndex, plan: Plan) -> Index:
        """The index that a plan asks: the table's, or an exact scan of its middle."""
        if plan.method == INDEX and keeper.index is not None:
            return keeper.index
        return FlatIndex.over(table.key_view(), plan.sinks_stop, plan.tail_start, workspace=self._workspace)


class _Work(NamedTuple):
    """What the kernel is told of a batch besides the work itself; see `attend_kernel`."""

    lines: IntArray
    sizes: IntArray
    candidates: IntArray
    reduce_code: int
    q: FloatArray
    floats: FloatArray
    ints: IntArray
    tiles: FloatArray
    lists: IntArray
    chosen: IntArray
    out: FloatArray
    log_norm: FloatArray


def _numbers(plan: Plan, s: Schema) -> int:
    """Numbers of rows that a query head meets."""
    return plan.n_attended * s.value_dim + max(plan.n_attended, plan.n_candidates) * s.head_dim


def _line(table: AnyRows, plan: Plan, n_heads: int) -> tuple[int, ...]:
    """A line of `plans`, see `attend_kernel`."""
    counts = sum(plan.by_head, ()) or (plan.n_candidates, plan.n_selected) * n_heads
    return (*table.address_tables, plan.first, plan.sinks_stop, plan.tail_start, plan.n_rows, *counts)


def _pieces(plan: Plan) -> int:
    """Number of pieces that the always-attended rows are cut into."""
    return max(1, -(-(plan.sinks_stop - plan.first + plan.n_rows - plan.tail_start) // KEPT_ROWS))


def _kept_ranges(plan: Plan, piece: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows of a piece, [start, stop) among the sinks and [start, stop) in the tail, as the kernel takes them."""
    n_sinks = plan.sinks_stop - plan.first
    low, high = piece * KEPT_ROWS, min((piece + 1) * KEPT_ROWS, n_sinks + plan.n_rows - plan.tail_start)
    tail = plan.tail_start - n_sinks
    in_sinks = plan.first + low, max(plan.first + low, plan.first + min(high, n_sinks))
    return in_sinks, (tail + max(low, n_sinks), max(tail + max(low, n_sinks), tail + high))


def _kept_away(table: AnyRows, plan: Plan) -> bool:
    """Whether some of the rows that are always attended have to be brought from the disk."""
    if not isinstance(table, PagedRows):
        return False
    return not (table.has(plan.first, plan.sinks_stop) and table.has(plan.tail_start, plan.n_rows))


def _row_ids(chosen: IntArray, ids: IntArray, rows: IntArray) -> IntArray:
    """Return the rows that stand behind ids chosen, int64 [n_kv_heads, n], -1 for none: ids[i] was given to rows[i]."""
    order = np.argsort(ids, axis=1)
    found = np.full_like(chosen, -1)
    for head, line in enumerate(chosen):
        is_row = line >= 0
        at = np.searchsorted(ids[head, order[head]], line[is_row])
        found[head, is_row] = rows[head, order[head, at]]
    return found


def _joined(parts: list[Attended]) -> Attended:
    """Put the answers of single sequences together."""
    width = max(part.chosen.shape[2] for part in parts)
    padded = [np.pad(p.chosen, ((0, 0), (0, 0), (0, width - p.chosen.shape[2])), constant_values=-1) for p in parts]
    return Attended(
        np.concatenate([part.out for part in parts]),
        np.concatenate([part.log_norm for part in parts]),
        np.concatenate(padded),
        sum(part.search_s for part in parts),
        sum(part.attend_s for part in parts),
    )


def _best(found: Candidates, by_head: tuple[tuple[int, int], ...]) -> npt.NDArray[np.int64]:
    """Keep of each KV head's rows as many as it may have, those with the best scores, ascending, at the front."""
    rows = found.rows.copy()
    for head, (n_candidates, _) in enumerate(by_head):
        order = np.lexsort((found.rows[head], -found.scores[head]))[:n_candidates]
        rows[head, : len(order)] = np.sort(found.rows[head, order])
    return rows


def _stack(found: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    width = max(rows.shape[1] for rows in found)
    stacked = np.zeros((len(found), found[0].shape[0], width), np.int64)
    for i, rows in enumerate(found):
        stacked[i, :, : rows.shape[1]] = rows
    return stacked
