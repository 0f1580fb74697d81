"""Selective attention of one token over rows where they lie: rerank, fetch and softmax in one pass."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from kvstore.index.flat_kernels import scan_width
from kvstore.index.jit import jit
from kvstore.kernels.pieces import HEAD, PIECE, SEQUENCE, merge_pieces, pick_rows, soften, state_parts
from kvstore.kernels.row_kernels import (
    TILE_ROWS,
    fetch_rows,
    list_addresses,
    row_adder,
    row_address,
    row_scorer,
    vector_dim,
)

if TYPE_CHECKING:
    from kvstore.schema import Schema

SPLIT_ROWS = 2048
"""Rows of one piece of a long range. A piece's size depends on nothing but this, so that results do not depend on
the number of threads or on what else is in the batch."""

_LIST = TILE_ROWS + 4
"""Room for the addresses of a tile."""

# Columns of `plans`, int64 [n_sequences, 6 + 2 * n_kv_heads]; then, for each KV head, candidates and how many to pick
KEY_BLOCKS, VALUE_BLOCKS, FIRST, SINKS_STOP, TAIL_START, N_ROWS, BY_HEAD = range(7)
# Entries of `sizes`, int64 [7]
SHIFT, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, KEY_DIM, VALUE_DIM = range(7)


def row_sizes(schema: Schema) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where rows lie in a block, int64 [7], see above; distances in bytes."""
    key_bytes, value_bytes = schema.key_bytes, schema.value_bytes
    rows = schema.block_tokens
    strides = (rows * key_bytes, key_bytes, rows * value_bytes, value_bytes)
    return np.array([rows.bit_length() - 1, *strides, schema.head_dim, schema.value_dim], np.int64)


@functools.lru_cache(maxsize=64)  # the same few come over and over
def list_items(n_pieces: tuple[int, ...], n_heads: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """List the work on sequences of so many pieces: int64 [n_items, 3], a head's pieces together, not to be changed."""
    found = [(b, head, p) for b, pieces in enumerate(n_pieces) for head in range(n_heads) for p in range(pieces)]
    return np.array(found, np.int64).reshape(-1, 3)


def scratch_sizes(group: int, n_candidates: int, n_selected: int) -> tuple[int, int]:
    """Return how many float32 and int64 of scratch one item of work needs."""
    whole = -(-n_candidates // 4) * 4
    floats = group * (TILE_ROWS + whole) + (group + 2) * whole + n_selected
    return floats, n_selected + whole // 2 + 1 + 2 * _LIST


@functools.cache
def attend_kernel(key_dim: int, value_dim: int, dtype_code: int, group: int) -> Any:
    """Return the kernel for rows of these sizes; its results are the same bits on any number of threads.

    `attend(plans, sizes, candidates, reduce_code, q, items, floats, ints, states, chosen, merge, out, log_norm)` does
    the work that `items` list, each by itself, and, where `merge` says so, puts the results together as `merge_pieces`
    does.

    - plans: int64 [n_sequences, 6 + 2 * n_kv_heads], a line a sequence, see the columns above; sizes: int64 [7];
    - candidates: int64 [n_sequences, n_kv_heads, >= n_candidates], row ids; equal scores go to the first of them;
    - q: float32 [n_sequences, n_kv_heads, group, key_dim], already multiplied with the softmax scale;
    - items: int64 [n_items, 3], sequence, head and piece: SPLIT_ROWS of the rows that are always attended, counted from
      the first sink on; piece 0 also takes the candidates;
    - floats, ints: scratch, float32 and int64 [n_items, ...], see `scratch_sizes`;
    - states: float32 [n_items, group * (value_dim + 2)], out, see `state_parts`;
    - chosen: int64 [n_sequences, n_kv_heads, >= the most picked], out, those picked, in the order of the candidates,
      then -1.

    Per head O((kept + candidates) * key_dim + (kept + selected) * value_dim) for each of its query heads.
    """
    width = scan_width(group)
    score = row_scorer(vector_dim(key_dim), dtype_code, width)
    add = row_adder(vector_dim(value_dim), dtype_code, width)
    take_piece = _piece_taker(score, add)
    take_candidates = _candidate_taker(score, add)

    @jit(parallel=True)
    def attend(
        plans: Any, sizes: Any, candidates: Any, reduce_code: Any, q: Any, items: Any, floats: Any, ints: Any,
        states: Any, chosen: Any, merge: Any, out: Any, log_norm: Any,
    ) -> None:  # fmt: skip
        """See `attend_kernel`."""
        for i in numba.prange(items.shape[0]):
            b, head, piece = items[i, SEQUENCE], items[i, HEAD], items[i, PIECE]
            plan, q_head, state = plans[b], q[b, head], state_parts(states[i], q.shape[2])
            states[i, :] = np.float32(0)
            state[0][:] = np.float32(-np.inf)
            take_piece(plan, sizes, head, piece, q_head, floats[i], ints[i], state)
            if piece == 0:
                n_candidates, n_selected = plan[BY_HEAD + 2 * head], plan[BY_HEAD + 2 * head + 1]
                if n_candidates > 0:
                    rows = candidates[b, head, :n_candidates]
                    take_candidates(
                        plan, sizes, head, rows, n_selected, reduce_code, q_head, chosen[b, head], floats[i], ints[i],
                        state,
                    )  # fmt: skip
                chosen[b, head, n_selected:] = -1
        if merge:
            merge_pieces(items, states, out, log_norm)

    return attend


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


def _piece_taker(score: Any, add: Any) -> Any:
    """Return the kernel that attends to one piece of the rows that are always attended."""

    @jit
    def take_range(plan, sizes, head, start, stop, q, floats, ints, state):  # type: ignore[no-untyped-def]
        """Attend to the rows [start, stop), a run of neighbors within one block at a time."""
        peak, norm, sums = state
        weights = floats[: q.shape[0] * TILE_ROWS].reshape(q.shape[0], TILE_ROWS)
        keys, values = ints[:_LIST], ints[_LIST : 2 * _LIST]
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
    def take_piece(plan, sizes, head, piece, q, floats, ints, state):  # type: ignore[no-untyped-def]
        """Attend to one piece of the rows that are always attended: the sinks followed by the tail."""
        n_sinks = plan[SINKS_STOP] - plan[FIRST]
        n_kept = n_sinks + plan[N_ROWS] - plan[TAIL_START]
        low, high = piece * SPLIT_ROWS, min((piece + 1) * SPLIT_ROWS, n_kept)
        first, tail = plan[FIRST], plan[TAIL_START] - n_sinks
        take_range(plan, sizes, head, first + low, first + min(high, n_sinks), q, floats, ints, state)
        take_range(plan, sizes, head, tail + max(low, n_sinks), tail + high, q, floats, ints, state)

    return take_piece


def _candidate_taker(score: Any, add: Any) -> Any:
    """Return the kernel that scores a head's candidates exactly, chooses, and attends to the chosen."""

    @jit
    def score_rows(plan, sizes, head, rows, q, scores, keys, ahead):  # type: ignore[no-untyped-def]
        """Write the products of q and all rows' keys; a tile is fetched while the one before is scored."""
        row_bytes = sizes[KEY_ROW_BYTES]
        n = _list_keys(plan, sizes, head, rows[:TILE_ROWS], keys)
        fetch_rows(keys, 0, n, row_bytes)
        for low in range(0, rows.shape[0], TILE_ROWS):
            n_ahead = _list_keys(plan, sizes, head, rows[low + TILE_ROWS : low + 2 * TILE_ROWS], ahead)
            score(keys, n, ahead, n_ahead, row_bytes, q, low, scores)
            keys, ahead, n = ahead, keys, n_ahead

    @jit
    def add_values(plan, sizes, head, rows, picked, scores, weights, values, ahead, state):  # type: ignore[no-untyped-def]
        """Attend to rows whose scores are scores[:, picked], a tile at a time."""
        peak, norm, sums = state
        row_bytes = sizes[VALUE_ROW_BYTES]
        n = _list_values(plan, sizes, head, rows[:TILE_ROWS], values)
        fetch_rows(values, 0, n, row_bytes)
        for low in range(0, rows.shape[0], TILE_ROWS):
            for g in range(scores.shape[0]):
                for i in range(n):
                    weights[g, i] = scores[g, picked[low + i]]
            soften(weights, n, peak, norm, sums)
            n_ahead = _list_values(plan, sizes, head, rows[low + TILE_ROWS : low + 2 * TILE_ROWS], ahead)
            add(values, n, ahead, n_ahead, row_bytes, weights, sums)
            values, ahead, n = ahead, values, n_ahead

    @jit
    def take_candidates(plan, sizes, head, rows, n_selected, code, q, chosen, floats, ints, state):  # type: ignore[no-untyped-def]
        """Score the candidates exactly, choose, and attend to the chosen."""
        group, n = q.shape[0], rows.shape[0]
        whole, used = n + (-n) % 4, q.shape[0] * TILE_ROWS
        weights = floats[:used].reshape(group, TILE_ROWS)
        scores = floats[used : used + group * whole].reshape(group, whole)
        here, there = ints[:_LIST], ints[_LIST : 2 * _LIST]
        picked, places = ints[2 * _LIST : 2 * _LIST + n_selected], ints[2 * _LIST + n_selected :].view(np.int32)
        score_rows(plan, sizes, head, rows, q, scores, here, there)
        pick_rows(scores, n, n_selected, code, floats[used + group * whole :], places, picked)
        for i in range(n_selected):
            chosen[i] = rows[picked[i]]
        add_values(plan, sizes, head, chosen[:n_selected], picked, scores, weights, here, there, state)

    return take_candidates
