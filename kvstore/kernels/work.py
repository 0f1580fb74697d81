"""The work of one attention call: what kernels are told of rows and plans, and how it is cut into pieces.

Pieces depend on nothing but the plan of their sequence, so that results do not depend on the number of threads or on
what else is in the batch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.kernels.row_kernels import TILE_ROWS

if TYPE_CHECKING:
    from kvstore.schema import Schema

IntArray = npt.NDArray[np.int64]

KEPT_ROWS = 2048
"""Rows of a piece of those that are always attended."""

SELECTED_ROWS = 384
"""Rows of a piece of those that are selected: a few heads give every thread as much to do."""

CHUNK_ROWS = 384
"""Candidates that are scored by one thread; the scores do not depend on it."""

LIST = TILE_ROWS + 4
"""Room for the addresses of a tile."""

# Columns of `plans`, int64 [n_sequences, 6 + 2 * n_kv_heads]; then, for each KV head, candidates and how many to pick
KEY_BLOCKS, VALUE_BLOCKS, FIRST, SINKS_STOP, TAIL_START, N_ROWS, BY_HEAD = range(7)
# Entries of `sizes`, int64 [7]
SHIFT, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, KEY_DIM, VALUE_DIM = range(7)
# Columns of `items`, int64 [n_items, 3]
SEQUENCE, HEAD, PIECE = range(3)


def row_sizes(schema: Schema) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where rows lie in a block, int64 [7], see above; distances in bytes."""
    key_bytes, value_bytes = schema.key_bytes, schema.value_bytes
    rows = schema.block_tokens
    strides = (rows * key_bytes, key_bytes, rows * value_bytes, value_bytes)
    return np.array([rows.bit_length() - 1, *strides, schema.head_dim, schema.value_dim], np.int64)


@functools.lru_cache(maxsize=64)  # the same few come over and over
def list_items(n_kept: tuple[int, ...], n_selected: tuple[tuple[int, ...], ...]) -> IntArray:
    """List the pieces of sequences, int64 [n_items, 3], a head's together: not to be changed.

    n_kept: pieces of the rows that are always attended, of each sequence; n_selected: rows selected by its heads. A
    head's pieces of those follow.
    """
    found = [
        (b, head, piece)
        for b, (kept, by_head) in enumerate(zip(n_kept, n_selected, strict=True))
        for head, selected in enumerate(by_head)
        for piece in range(kept + -(-selected // SELECTED_ROWS))
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def count_chunks(n_candidates: int) -> int:
    """Return how many threads can score that many candidates of a head."""
    return max(1, -(-n_candidates // CHUNK_ROWS))


def head_scratch(group: int, n_candidates: int, n_selected: int) -> tuple[int, int]:
    """Return how many float32 and int64 of scratch a KV head of a sequence needs."""
    whole = -(-n_candidates // 4) * 4
    return (2 * group + 2) * whole + n_selected, n_selected + whole // 2 + 1
