"""Selective attention of one token over rows where they lie: rerank, fetch and softmax in one pass."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from kvstore.index.jit import jit
from kvstore.index.reduce import reduce_group
from kvstore.index.select import select_top_k
from kvstore.kernels.tiles import (
    TILE_ROWS,
    constant_dim,
    fetch_rows,
    row_address,
    run_reader,
    soften,
    tile_adder,
    tile_loader,
    tile_scorer,
)

if TYPE_CHECKING:
    from kvstore.schema import Schema

SPLIT_ROWS = 2048
"""Rows of one piece of a long range. A piece's size depends on nothing but this, so that results do not depend on
the number of threads or on what else is in the batch."""

# Columns of `plans`, int64 [n_sequences, 6]
KEY_BLOCKS, VALUE_BLOCKS, FIRST, SINKS_STOP, TAIL_START, N_ROWS = range(6)
# Columns of `counts`, int64 [n_sequences, n_kv_heads, 2]
N_CANDIDATES, N_SELECTED = range(2)
# Entries of `sizes`, int64 [7]
SHIFT, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, KEY_DIM, VALUE_DIM = range(7)
# Columns of `items`, int64 [n_items, 3]
SEQUENCE, HEAD, PIECE = range(3)


def row_sizes(schema: Schema) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where rows lie in a block, int64 [7], see above; distances in bytes."""
    key_bytes, value_bytes = schema.key_bytes, schema.value_dim * schema.torch_dtype.itemsize
    rows = schema.block_tokens
    strides = (rows * key_bytes, key_bytes, rows * value_bytes, value_bytes)
    return np.array([rows.bit_length() - 1, *strides, schema.head_dim, schema.value_dim], np.int64)


@functools.lru_cache(maxsize=64)  # the same few come over and over
def list_items(n_pieces: tuple[int, ...], n_heads: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """List the work on sequences of so many pieces: int64 [n_items, 3], a head's pieces together, not to be changed."""
    found = [(b, head, p) for b, pieces in enumerate(n_pieces) for head in range(n_heads) for p in range(pieces)]
    return np.array(found, np.int64).reshape(-1, 3)


@jit
def _addresses(blocks: Any, sizes: Any, head_bytes: Any, row_bytes: Any, rows: Any, out: Any) -> None:
    for i in range(rows.shape[0]):
        out[i] = row_address(blocks, sizes[SHIFT], head_bytes, row_bytes, rows[i])


@jit
def _row_addresses(plan: Any, sizes: Any, head: Any, row: Any) -> Any:
    """Addresses of a row's key and of its value."""
    key_offset, value_offset = head * sizes[KEY_HEAD_BYTES], head * sizes[VALUE_HEAD_BYTES]
    key = row_address(plan[KEY_BLOCKS], sizes[SHIFT], key_offset, sizes[KEY_ROW_BYTES], row)
    return key, row_address(plan[VALUE_BLOCKS], sizes[SHIFT], value_offset, sizes[VALUE_ROW_BYTES], row)


@jit
def _fetch_keys(plan: Any, sizes: Any, head: Any, rows: Any) -> None:
    """Ask the memory for the keys of these rows."""
    row_bytes = sizes[KEY_ROW_BYTES]
    fetch_rows(plan[KEY_BLOCKS], sizes[SHIFT], head * sizes[KEY_HEAD_BYTES], row_bytes, row_bytes, rows)


@jit
def _fetch_values(plan: Any, sizes: Any, head: Any, rows: Any) -> None:
    """Ask the memory for the values of these rows."""
    row_bytes = sizes[VALUE_ROW_BYTES]
    fetch_rows(plan[VALUE_BLOCKS], sizes[SHIFT], head * sizes[VALUE_HEAD_BYTES], row_bytes, row_bytes, rows)


@jit
def _pick(scores: Any, n_selected: Any, reduce_code: Any) -> Any:
    """Places of the n_selected candidates with the best group scores, ascending; scores [group, n] are scaled."""
    n = scores.shape[1]
    weights = scores.copy()  # they are reduced in place, and the softmax wants the scores again
    reduce_group(weights, np.float32(1), reduce_code, np.empty(scores.shape[0], np.float32))
    places, values = np.empty(n + 1, np.int32), np.empty(n + 1, np.float32)
    picked, ignored = np.empty(n_selected, np.int64), np.empty(n_selected, np.float32)
    select_top_k(weights[0], n_selected, places, values, picked, ignored)
    return picked


@jit
def merge_pieces(items: Any, peaks: Any, norms: Any, sums: Any, out: Any, log_norm: Any) -> None:
    """Merge the pieces of each head by their log-sum-exp: out = sum exp(peak - top) sums / sum exp(peak - top) norm.

    items: int64 [n_items, 3], a head's pieces together; peaks, norms float32 [n_items, group] and sums [..., value_dim]
    as `attend` leaves them; out float32 [n_sequences, n_kv_heads, group, value_dim], log_norm [..., group].
    """
    at = 0
    while at < items.shape[0]:
        stop = at + 1
        while stop < items.shape[0] and items[stop, PIECE] > 0:
            stop += 1
        b, head = items[at, SEQUENCE], items[at, HEAD]
        for g in range(peaks.shape[1]):
            top = peaks[at, g]
            for i in range(at + 1, stop):
                top = max(top, peaks[i, g])
            line = out[b, head, g]
            line[:] = np.float32(0)
            norm = np.float32(0)
            for i in range(at, stop):
                if norms[i, g] > 0:
                    weight = np.float32(np.exp(peaks[i, g] - top))
                    norm += weight * norms[i, g]
                    for d in range(line.shape[0]):
                        line[d] += weight * sums[i, g, d]
            for d in range(line.shape[0]):
                line[d] /= norm
            log_norm[b, head, g] = top + np.float32(np.log(norm))
        at = stop


@functools.cache
def attend_kernel(key_dim: int, value_dim: int, dtype_code: int) -> Any:
    """Return the kernel for rows of these sizes; its results are the same bits on any number of threads.

    `attend(plans, counts, sizes, candidates, reduce_code, q, items, peaks, norms, sums, chosen)` does the work that
    `items` list, each by itself; `merge_pieces` puts the results together.

    - plans: int64 [n_sequences, 6], a line a sequence, see the column names above; sizes: int64 [7];
    - counts: int64 [n_sequences, n_kv_heads, 2], candidates of a head, and how many of them are picked;
    - candidates: int64 [n_sequences, n_kv_heads, >= n_candidates], row ids; equal scores go to the first of them;
    - q: float32 [n_sequences, n_kv_heads, group, key_dim], already multiplied with the softmax scale;
    - items: int64 [n_items, 3], sequence, head and piece: SPLIT_ROWS of the rows that are always attended, counted from
      the first sink on; piece 0 also takes the candidates;
    - peaks, norms: float32 [n_items, group]; sums: float32 [n_items, group, value_dim]; out, see `soften`;
    - chosen: int64 [n_sequences, n_kv_heads, >= the most picked], out, those picked, in the order of the candidates.

    Per head O((kept + candidates) * key_dim + (kept + selected) * value_dim) for each of its query heads.
    """
    take_piece = _piece_taker(key_dim, value_dim, dtype_code)
    take_candidates = _candidate_taker(key_dim, value_dim, dtype_code)

    @jit(parallel=True)
    def attend(
        plans: Any, counts: Any, sizes: Any, candidates: Any, reduce_code: Any, q: Any, items: Any, peaks: Any,
        norms: Any, sums: Any, chosen: Any,
    ) -> None:  # fmt: skip
        """See `attend_kernel`."""
        for i in numba.prange(items.shape[0]):
            b, head, piece = items[i, SEQUENCE], items[i, HEAD], items[i, PIECE]
            plan, q_head = plans[b], q[b, head]
            peaks[i, :], norms[i, :], sums[i, :, :] = np.float32(-np.inf), np.float32(0), np.float32(0)
            take_piece(plan, sizes, head, piece, q_head, peaks[i], norms[i], sums[i])
            if piece == 0 and counts[b, head, N_CANDIDATES] > 0:
                rows = candidates[b, head, : counts[b, head, N_CANDIDATES]]
                take_candidates(
                    plan, sizes, head, rows, counts[b, head, N_SELECTED], reduce_code, q_head, chosen[b, head],
                    peaks[i], norms[i], sums[i],
                )  # fmt: skip

    return attend


def _piece_taker(key_dim: int, value_dim: int, dtype_code: int) -> Any:
    """Return the kernel that attends to one piece of the rows that are always attended."""
    read_keys = run_reader(dtype_code, constant_dim(key_dim))
    read_values = run_reader(dtype_code, constant_dim(value_dim))
    score = tile_scorer(constant_dim(key_dim))
    add = tile_adder(constant_dim(value_dim))

    @jit
    def take_range(
        plan: Any, sizes: Any, head: Any, start: Any, stop: Any, q: Any, peak: Any, norm: Any, sums: Any
    ) -> None:
        """Attend to the rows [start, stop), a run of neighbours within one block at a time."""
        key_tile = np.empty((TILE_ROWS, sizes[KEY_DIM]), np.float32)
        value_tile = np.empty((TILE_ROWS, sizes[VALUE_DIM]), np.float32)
        weights = np.empty((q.shape[0], TILE_ROWS), np.float32)
        block_tokens = 1 << sizes[SHIFT]
        low = start
        while low < stop:
            n = min(TILE_ROWS, stop - low, block_tokens - (low & (block_tokens - 1)))
            key, value = _row_addresses(plan, sizes, head, low)
            score(read_keys(key, n, sizes[KEY_DIM], key_tile), n, sizes[KEY_DIM], q, 0, weights)
            soften(weights, n, peak, norm, sums)
            add(read_values(value, n, sizes[VALUE_DIM], value_tile), n, sizes[VALUE_DIM], weights, sums)
            low += n

    @jit
    def take_piece(plan: Any, sizes: Any, head: Any, piece: Any, q: Any, peak: Any, norm: Any, sums: Any) -> None:
        """Attend to one piece of the rows that are always attended: the sinks followed by the tail."""
        n_sinks = plan[SINKS_STOP] - plan[FIRST]
        n_kept = n_sinks + plan[N_ROWS] - plan[TAIL_START]
        low, high = piece * SPLIT_ROWS, min((piece + 1) * SPLIT_ROWS, n_kept)
        first, tail = plan[FIRST], plan[TAIL_START] - n_sinks
        take_range(plan, sizes, head, first + low, first + min(high, n_sinks), q, peak, norm, sums)
        take_range(plan, sizes, head, tail + max(low, n_sinks), tail + high, q, peak, norm, sums)

    return take_piece


def _candidate_taker(key_dim: int, value_dim: int, dtype_code: int) -> Any:
    """Return the kernel that scores a head's candidates exactly, chooses, and attends to the chosen."""
    score_candidates = _candidate_scorer(key_dim, dtype_code)
    add_values = _value_adder(value_dim, dtype_code)

    @jit
    def take_candidates(
        plan: Any, sizes: Any, head: Any, rows: Any, n_selected: Any, reduce_code: Any, q: Any, chosen: Any,
        peak: Any, norm: Any, sums: Any,
    ) -> None:  # fmt: skip
        """Score the candidates exactly, choose, and attend to the chosen."""
        scores = np.empty((q.shape[0], rows.shape[0]), np.float32)
        score_candidates(plan, sizes, head, rows, q, scores)
        picked = _pick(scores, n_selected, reduce_code) if n_selected < rows.shape[0] else np.arange(rows.shape[0])
        tile = np.empty((TILE_ROWS, sizes[VALUE_DIM]), np.float32)
        weights = np.empty((q.shape[0], TILE_ROWS), np.float32)
        for i in range(picked.shape[0]):
            chosen[i] = rows[picked[i]]
        _fetch_values(plan, sizes, head, chosen[: min(TILE_ROWS, picked.shape[0])])
        for low in range(0, picked.shape[0], TILE_ROWS):
            n = min(TILE_ROWS, picked.shape[0] - low)
            _fetch_values(plan, sizes, head, chosen[low + TILE_ROWS : min(low + 2 * TILE_ROWS, picked.shape[0])])
            for g in range(q.shape[0]):
                for i in range(n):
                    weights[g, i] = scores[g, picked[low + i]]
            soften(weights, n, peak, norm, sums)
            add_values(plan, sizes, head, chosen[low : low + n], weights, sums, tile)

    return take_candidates


def _candidate_scorer(key_dim: int, dtype_code: int) -> Any:
    """Return the kernel that scores rows wherever they lie."""
    load_keys = tile_loader(dtype_code, constant_dim(key_dim))
    score = tile_scorer(constant_dim(key_dim))

    @jit
    def score_rows(plan: Any, sizes: Any, head: Any, rows: Any, q: Any, at: Any, scores: Any, tile: Any) -> None:
        """Write the products of q and the keys of these rows to scores[:, at:]; at most a tile."""
        addresses = np.empty(TILE_ROWS, np.int64)
        offset = head * sizes[KEY_HEAD_BYTES]
        _addresses(plan[KEY_BLOCKS], sizes, offset, sizes[KEY_ROW_BYTES], rows, addresses)
        load_keys(addresses, rows.shape[0], sizes[KEY_DIM], tile)
        score(tile, rows.shape[0], sizes[KEY_DIM], q, at, scores)

    @jit
    def score_candidates(plan: Any, sizes: Any, head: Any, rows: Any, q: Any, scores: Any) -> None:
        """Write the products of q and all candidates' keys; the next tile is fetched while one is scored."""
        tile = np.empty((TILE_ROWS, sizes[KEY_DIM]), np.float32)
        for low in range(0, rows.shape[0], TILE_ROWS):
            _fetch_keys(plan, sizes, head, rows[low + TILE_ROWS : low + 2 * TILE_ROWS])
            score_rows(plan, sizes, head, rows[low : low + TILE_ROWS], q, low, scores, tile)

    return score_candidates


def _value_adder(value_dim: int, dtype_code: int) -> Any:
    """Return the kernel that adds up weighted values of rows wherever they lie."""
    load_values = tile_loader(dtype_code, constant_dim(value_dim))
    add = tile_adder(constant_dim(value_dim))

    @jit
    def add_values(plan: Any, sizes: Any, head: Any, rows: Any, weights: Any, sums: Any, tile: Any) -> None:
        """Add the values of these rows, each times its weight, to sums [group, value_dim]; at most a tile."""
        addresses = np.empty(TILE_ROWS, np.int64)
        offset = head * sizes[VALUE_HEAD_BYTES]
        _addresses(plan[VALUE_BLOCKS], sizes, offset, sizes[VALUE_ROW_BYTES], rows, addresses)
        load_values(addresses, rows.shape[0], sizes[VALUE_DIM], tile)
        add(tile, rows.shape[0], sizes[VALUE_DIM], weights, sums)

    return add_values
