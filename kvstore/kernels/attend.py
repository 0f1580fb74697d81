"""Selective attention of one token over rows where they lie: rerank, fetch and softmax in one call."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from kvstore.index.jit import jit
from kvstore.kernels.pieces import merge_pieces, pick_rows, soften, state_parts
from kvstore.kernels.row_kernels import (
    TILE_ROWS,
    fetch_rows,
    list_addresses,
    row_adder,
    row_address,
    row_scorer,
    vector_dim,
)
from kvstore.kernels.work import (
    BY_HEAD,
    CHUNK_ROWS,
    FIRST,
    HEAD,
    KEPT_ROWS,
    KEY_BLOCKS,
    KEY_HEAD_BYTES,
    KEY_ROW_BYTES,
    LIST,
    N_ROWS,
    PIECE,
    SELECTED_ROWS,
    SEQUENCE,
    SHIFT,
    SINKS_STOP,
    TAIL_START,
    VALUE_BLOCKS,
    VALUE_HEAD_BYTES,
    VALUE_ROW_BYTES,
)


@functools.cache
def attend_kernel(key_dim: int, value_dim: int, dtype_code: int, group: int) -> Any:
    """Return the kernel for rows of these sizes; its results are the same bits on any number of threads.

    `attend(plans, sizes, candidates, reduce_code, q, items, floats, ints, tiles, lists, states, chosen, select, merge,
    out, log_norm)` scores the candidates of every head exactly and picks among them, where `select` says so; then does
    the work that `items` list, each by itself; then, where `merge` says so, puts the results together as `merge_pieces`
    does.

    - plans: int64 [n_sequences, 6 + 2 * n_kv_heads], a line a sequence, see `kernels.work`; sizes: int64 [7];
    - candidates: int64 [n_sequences, n_kv_heads, >= n_candidates], row ids; equal scores go to the first of them;
    - q: float32 [n_sequences, n_kv_heads, group, key_dim], already multiplied with the softmax scale;
    - items: int64 [n_items, 3], sequence, head and piece, see `list_items`;
    - floats, ints: scratch, float32 and int64 [n_sequences * n_kv_heads, ...], see `head_scratch`; what is picked stays
      in them for a call without `select`;
    - tiles, lists: scratch, float32 [n, group * TILE_ROWS] and int64 [n, 2 * LIST], a line for each item and for each
      chunk of candidates;
    - states: float32 [n_items, group * (value_dim + 2)], out, see `state_parts`;
    - chosen: int64 [n_sequences, n_kv_heads, >= the most picked], out, those picked, in the order of the candidates,
      then -1.

    Per head O((kept + candidates) * key_dim + (kept + selected) * value_dim) for each of its query heads.
    """
    score = row_scorer(vector_dim(key_dim), dtype_code, group)
    add = row_adder(vector_dim(value_dim), dtype_code, group)
    score_chunk = _chunk_scorer(score)
    take_kept, take_selected = _kept_taker(score, add), _selected_taker(add)

    @jit(parallel=True)
    def attend(
        plans: Any, sizes: Any, candidates: Any, reduce_code: Any, q: Any, items: Any, floats: Any, ints: Any,
        tiles: Any, lists: Any, states: Any, chosen: Any, select: Any, merge: Any, out: Any, log_norm: Any,
    ) -> None:  # fmt: skip
        """See `attend_kernel`."""
        n_sequences, n_heads = q.shape[:2]
        if select:
            n_chunks = max(1, (candidates.shape[2] + CHUNK_ROWS - 1) // CHUNK_ROWS)
            for task in numba.prange(n_sequences * n_heads * n_chunks):
                score_chunk(plans, sizes, candidates, np.int64(task), n_chunks, q, floats, lists)
            for line in numba.prange(n_sequences * n_heads):
                _pick(plans, candidates, np.int64(line), reduce_code, q, floats, ints, chosen)
        for i in numba.prange(items.shape[0]):
            b, head, piece = items[i, SEQUENCE], items[i, HEAD], items[i, PIECE]
            plan, state = plans[b], state_parts(states[i], q.shape[2])
            states[i, :] = np.float32(0)
            state[0][:] = np.float32(-np.inf)
            selected = piece - _kept_pieces(plan)
            if selected < 0:
                take_kept(plan, sizes, head, piece, q[b, head], tiles[i], lists[i], state)
            else:
                line = b * n_heads + head
                rows = chosen[b, head, : plan[BY_HEAD + 2 * head + 1]]
                scores = _scores(floats[line], q.shape[2], plan[BY_HEAD + 2 * head])
                take_selected(plan, sizes, head, rows, selected, ints[line], scores, tiles[i], lists[i], state)
        if merge:
            merge_pieces(items, states, out, log_norm)

    return attend


@jit
def _kept_pieces(plan: Any) -> Any:
    """Return into how many pieces the rows that are always attended are cut, at least 1."""
    n_kept = plan[SINKS_STOP] - plan[FIRST] + plan[N_ROWS] - plan[TAIL_START]
    return max(1, (n_kept + KEPT_ROWS - 1) // KEPT_ROWS)


@jit
def _scores(floats: Any, group: Any, n: Any) -> Any:
    """View the exact scores of a head's n candidates, float32 [group, n rounded up to fours], in its scratch."""
    whole = n + (-n) % 4
    return floats[: group * whole].reshape(group, whole)


@jit
def _pick(
    plans: Any, candidates: Any, line: Any, reduce_code: Any, q: Any, floats: Any, ints: Any, chosen: Any
) -> None:
    """Choose among the candidates of a head: line = sequence * n_kv_heads + head."""
    b, head = divmod(line, q.shape[1])
    n, n_selected = plans[b, BY_HEAD + 2 * head], plans[b, BY_HEAD + 2 * head + 1]
    if n > 0:
        scores, picked = _scores(floats[line], q.shape[2], n), ints[line, :n_selected]
        places = ints[line, n_selected:].view(np.int32)
        pick_rows(scores, n, n_selected, reduce_code, floats[line, scores.size :], places, picked)
        for i in range(n_selected):
            chosen[b, head, i] = candidates[b, head, picked[i]]
    chosen[b, head, n_selected:] = -1


@jit
def _list_keys(plan: Any, sizes: Any, head: Any, rows: Any, out: Any) -> Any:
    """List where the keys of these rows, at most a tile, begin; return how many rows there are."""
    list_addresses(plan[KEY_BLOCKS], sizes[SHIFT], head * sizes[KEY_HEAD_BYTES], sizes[KEY_ROW_BYTES], rows, out)
    return rows.shape[0]


@jit
def _list_values(plan: Any, sizes: Any, head: Any, rows: Any, out: Any) -> Any:
    """The same for their values."""
    list_addresses(plan[VALUE_BLOCKS], sizes[SHIFT], head * sizes[VALUE_HEAD_BYTES], sizes[VALUE_ROW_BYTES], rows, out)
    return rows.shape[0]


@jit
def _list_run(blocks: Any, sizes: Any, head_bytes: Any, row_bytes: Any, low: Any, stop: Any, out: Any) -> Any:
    """List where the rows from `low` on begin, those of a block and before `stop`, at most a tile; return how many."""
    block_tokens = 1 << sizes[SHIFT]
    n = max(0, min(TILE_ROWS, stop - low, block_tokens - (low & (block_tokens - 1))))
    if n > 0:
        first = row_address(blocks, sizes[SHIFT], head_bytes, row_bytes, low)
        for i in range(n + (-n) % 4):
            out[i] = first + min(i, n - 1) * row_bytes
    return n


def _kept_taker(score: Any, add: Any) -> Any:
    """Return the kernel that attends to one piece of the rows that are always attended."""

    @jit
    def take_range(plan, sizes, head, start, stop, q, tile, lists, state):  # type: ignore[no-untyped-def]
        """Attend to the rows [start, stop), a run of neighbors within one block at a time."""
        peak, norm, sums = state
        weights = tile[: q.shape[0] * TILE_ROWS].reshape(q.shape[0], TILE_ROWS)
        keys, values = lists[:LIST], lists[LIST : 2 * LIST]
        key_head, value_head = head * sizes[KEY_HEAD_BYTES], head * sizes[VALUE_HEAD_BYTES]
        key_bytes, value_bytes = sizes[KEY_ROW_BYTES], sizes[VALUE_ROW_BYTES]
        n = _list_run(plan[KEY_BLOCKS], sizes, key_head, key_bytes, start, stop, keys)
        low = start
        while n > 0:
            _list_run(plan[VALUE_BLOCKS], sizes, value_head, value_bytes, low, stop, values)
            score(keys, n, values, n, value_bytes, q, 0, weights)
            soften(weights, n, peak, norm, sums)
            low += n
            n_next = _list_run(plan[KEY_BLOCKS], sizes, key_head, key_bytes, low, stop, keys)
            add(values, n, keys, n_next, key_bytes, weights, sums)
            n = n_next

    @jit
    def take_kept(plan, sizes, head, piece, q, tile, lists, state):  # type: ignore[no-untyped-def]
        """Attend to one piece of the rows that are always attended: the sinks followed by the tail."""
        n_sinks = plan[SINKS_STOP] - plan[FIRST]
        n_kept = n_sinks + plan[N_ROWS] - plan[TAIL_START]
        low, high = piece * KEPT_ROWS, min((piece + 1) * KEPT_ROWS, n_kept)
        first, tail = plan[FIRST], plan[TAIL_START] - n_sinks
        take_range(plan, sizes, head, first + low, first + min(high, n_sinks), q, tile, lists, state)
        take_range(plan, sizes, head, tail + max(low, n_sinks), tail + high, q, tile, lists, state)

    return take_kept


def _chunk_scorer(score: Any) -> Any:
    """Return the kernel that scores a chunk of a head's candidates exactly."""

    @jit
    def score_rows(plan, sizes, head, rows, q, at, scores, keys, ahead):  # type: ignore[no-untyped-def]
        """Write the products of q and the rows' keys from column `at` on; a tile is fetched while one is scored."""
        row_bytes = sizes[KEY_ROW_BYTES]
        n = _list_keys(plan, sizes, head, rows[:TILE_ROWS], keys)
        fetch_rows(keys, 0, n, row_bytes)
        for low in range(0, rows.shape[0], TILE_ROWS):
            n_ahead = _list_keys(plan, sizes, head, rows[low + TILE_ROWS : low + 2 * TILE_ROWS], ahead)
            score(keys, n, ahead, n_ahead, row_bytes, q, at + low, scores)
            keys, ahead, n = ahead, keys, n_ahead

    @jit
    def score_chunk(plans, sizes, candidates, task, n_chunks, q, floats, lists):  # type: ignore[no-untyped-def]
        """Score chunk `task % n_chunks` of a head; chunks are as equal as whole fours of rows can be."""
        line, chunk = divmod(task, n_chunks)
        b, head = divmod(line, q.shape[1])
        n = plans[b, BY_HEAD + 2 * head]
        fours = (n + 3) // 4
        low, high = 4 * (fours * chunk // n_chunks), min(n, 4 * (fours * (chunk + 1) // n_chunks))
        if low < high:
            rows, scores = candidates[b, head, low:high], _scores(floats[line], q.shape[2], n)
            here, there = lists[task, :LIST], lists[task, LIST : 2 * LIST]
            score_rows(plans[b], sizes, head, rows, q[b, head], low, scores, here, there)

    return score_chunk


def _selected_taker(add: Any) -> Any:
    """Return the kernel that attends to one piece of the rows that were picked."""

    @jit
    def take_selected(plan, sizes, head, rows, piece, picked, scores, tile, lists, state):  # type: ignore[no-untyped-def]
        """Attend to a piece of rows, int64 [n], whose scores are scores[:, picked[:n]], a tile at a time."""
        peak, norm, sums = state
        group, row_bytes = scores.shape[0], sizes[VALUE_ROW_BYTES]
        weights = tile[: group * TILE_ROWS].reshape(group, TILE_ROWS)
        values, ahead = lists[:LIST], lists[LIST : 2 * LIST]
        n_pieces = (rows.shape[0] + SELECTED_ROWS - 1) // SELECTED_ROWS
        start, stop = rows.shape[0] * piece // n_pieces, rows.shape[0] * (piece + 1) // n_pieces
        n = _list_values(plan, sizes, head, rows[start : min(stop, start + TILE_ROWS)], values)
        fetch_rows(values, 0, n, row_bytes)
        for low in range(start, stop, TILE_ROWS):
            for g in range(group):
                for i in range(n):
                    weights[g, i] = scores[g, picked[low + i]]
            soften(weights, n, peak, norm, sums)
            n_ahead = _list_values(plan, sizes, head, rows[low + TILE_ROWS : min(stop, low + 2 * TILE_ROWS)], ahead)
            add(values, n, ahead, n_ahead, row_bytes, weights, sums)
            values, ahead, n = ahead, values, n_ahead

    return take_selected
