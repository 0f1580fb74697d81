"""One search for the sequences of a batch: two launches for all of them instead of two for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.base import Candidates, FloatArray, Index
from kvstore.index.batch_kernels import rank_batch
from kvstore.index.batch_line import BatchLine
from kvstore.index.checks import checked_float, checked_range, checked_search
from kvstore.index.pq import PQIndex
from kvstore.index.rows import RowView
from kvstore.index.scanned import RANK_NS, ScannedIndex
from kvstore.index.threads import begin_work, end_work, run_parallel
from kvstore.index.workspace import Workspace

_PASS_SCORES = 1 << 20
"""Scores that a pass computes before it ranks them, unless one sequence has more: 4 MiB, which caches hold. Cutting
longer batches costs nothing that could be seen beside the work of a pass."""


class _Search(NamedTuple):
    """One sequence's part: its place in the batch; rows [low, high) to search; k of them wanted, 0 <= k <= high - low;
    where its answer begins among those of the batch."""

    place: int
    searched: Index
    low: int
    high: int
    k: int
    answer: int


class _Rooms(NamedTuple):
    """Where answers go: rows int64 [n] and scores float32 [n], [n_kv_heads, k] of each sequence, one after the other;
    log_norm float32 [n_sequences, n_kv_heads, group]."""

    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    log_norm: FloatArray

    def of(self, search: _Search) -> Candidates:
        """Return the room of one sequence, C-order."""
        shape = (self.log_norm.shape[1], search.k)
        start, stop = search.answer, search.answer + shape[0] * search.k
        rows, scores = self.rows[start:stop].reshape(shape), self.scores[start:stop].reshape(shape)
        return Candidates(rows, scores, self.log_norm[search.place])


_Member = tuple[_Search, BatchLine]


def search_batch(
    indexes: Sequence[Index],
    q: FloatArray,
    ks: Sequence[int],
    views: Sequence[RowView | None],
    ranges: Sequence[tuple[int, int]],
    *,
    scale: float,
    reduce: str = "sum_softmax",
    workspace: Workspace,
) -> list[Candidates]:
    """Search each index for a query of its own; each gets, bit for bit, what its `Index.search` gives.

    q is float32 [n_sequences, n_kv_heads, group, head_dim]; ks, views and ranges [start, stop) are what `Index.search`
    is told of each sequence. Indexes that lend themselves to it (`PQIndex.batch_line`) are scanned and ranked in one
    pass, all others one after the other. The answers lie in the workspace and are valid until its next batch. Raises
    what `Index.search` raises.
    """
    reduction = checked_search(min(ks, default=1), scale, reduce)
    if len(indexes) == 1 and isinstance(indexes[0], ScannedIndex):
        return [_search_one(indexes[0], q, ks[0], views[0], ranges[0], scale, reduction, workspace)]
    searches = _searches(indexes, ks, ranges, q.shape[1])
    rooms = _make_rooms(searches, q, workspace)
    alone, groups = _divided(searches)
    for members in groups:
        checked = _checked_queries(q, members[0][0].searched)
        for part in _passes(members, q.shape[1] * (q.shape[2] + 1)):
            _search_together(part, checked, rooms, float(scale), reduction, workspace)
    found = [rooms.of(search) for search in searches]
    for i, index, low, high, *_ in alone:
        index.search(q[i], ks[i], views[i], scale=scale, reduce=reduce, start=low, stop=high, out=found[i])
    return found


def _search_one(
    index: ScannedIndex,
    q: FloatArray,
    k: int,
    view: RowView | None,
    rows: tuple[int, int],
    scale: float,
    reduction: int,
    workspace: Workspace,
) -> Candidates:
    """Search for a batch of one, as most are: with as few calls as can be, for what they use is in no cache."""
    low, high = checked_range(*rows, index.first_row, index.stop_row)
    _, heads, group, _ = q.shape
    shape = (heads, min(k, high - low))
    found = Candidates(
        workspace.buffer("batch rows", shape, np.int64),
        workspace.buffer("batch scores", shape, np.float32),
        workspace.buffer("batch log norms", (heads, group), np.float32),
    )
    index.search_checked(_checked_queries(q, index)[0], view, scale, reduction, low, high, found)
    return found


def _searches(
    indexes: Sequence[Index], ks: Sequence[int], ranges: Sequence[tuple[int, int]], n_kv_heads: int
) -> list[_Search]:
    """Return what is asked of each sequence; raises `InvalidQueryError` for a range that leaves the rows covered."""
    found, answer = [], 0
    for place, (index, k, (start, stop)) in enumerate(zip(indexes, ks, ranges, strict=True)):
        low, high = checked_range(start, stop, index.first_row, index.stop_row)
        k = min(k, high - low)
        found.append(_Search(place, index, low, high, k, answer))
        answer += n_kv_heads * k
    return found


def _make_rooms(searches: list[_Search], q: FloatArray, workspace: Workspace) -> _Rooms:
    """Return room in the workspace for the answers of all sequences; q as in `search_batch`."""
    size = q.shape[1] * sum(search.k for search in searches)
    return _Rooms(
        workspace.buffer("batch rows", (size,), np.int64),
        workspace.buffer("batch scores", (size,), np.float32),
        workspace.buffer("batch log norms", q.shape[:3], np.float32),
    )


def _divided(searches: list[_Search]) -> tuple[list[_Search], list[list[_Member]]]:
    """Return the searches to be done one by one, and groups, of two at least, of those that one pass can do."""
    alone: list[_Search] = []
    groups: dict[object, list[_Member]] = {}
    for search in searches:
        index, many = search.searched, len(searches) > 1
        line = index.batch_line() if many and search.k and type(index) is PQIndex else None
        if line is None:
            alone.append(search)
        else:
            groups.setdefault(line.key, []).append((search, line))
    alone.extend(members[0][0] for members in groups.values() if len(members) == 1)
    return alone, [members for members in groups.values() if len(members) > 1]


def _checked_queries(q: FloatArray, index: Index) -> FloatArray:
    """Return q, C-order, as `Index.search` would want each sequence's; raises what that raises."""
    n, heads, group, dim = q.shape
    if group == 0:
        raise ValueError("queries must hold at least one query head a KV head")
    lines = checked_float(q.reshape(n * heads, group, dim), n * index.n_kv_heads, index.head_dim, "queries")
    return lines.reshape(q.shape)


def _passes(members: list[_Member], scores_a_row: int) -> Iterator[list[_Member]]:
    """Cut a group into passes of at most `_PASS_SCORES` scores, or one sequence."""
    part: list[_Member] = []
    count = 0
    for member in members:
        more = scores_a_row * (member[0].high - member[0].low)
        if part and count + more > _PASS_SCORES:
            yield part
            part, count = [], 0
        part.append(member)
        count += more
    yield part


def _search_together(
    members: list[_Member], q: FloatArray, rooms: _Rooms, scale: float, reduction: int, workspace: Workspace
) -> None:
    """Scan and rank; q [n_sequences, n_kv_heads, group, head_dim] is of the whole batch."""
    _, heads, group, _ = q.shape
    lines, n_rows, n_places = [], 0, 0
    for search, line in members:
        n, start = search.high - search.low, search.low - search.searched.first_row
        lines.append(
            (search.place, start, start + n, search.k, search.low, heads * (group + 1) * n_rows, heads * n_places,
             search.answer, *line.numbers)
        )  # fmt: skip
        n_rows, n_places = n_rows + n, n_places + n + 1
    table, coder = np.array(lines, np.int64), members[0][1].coder
    scores, places = (array.reshape(-1) for array in workspace.take(heads, group, n_places))
    before = begin_work((coder.score_ns(group) + RANK_NS * group) * heads * n_rows)
    try:
        coder.scan_batch(table, q, scores, workspace)
        run_parallel(rank_batch, table, scores, scale, reduction, places, *rooms)
    finally:
        end_work(before)
