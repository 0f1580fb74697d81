"""What the kernels of a batch have in common, and the one that ranks.

A table holds, a line a sequence, what a search of one is told, and addresses. The work is cut as for one sequence and
done by the same kernels, so that the results are the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import count_chunks
from kvstore.index.jit import jit
from kvstore.index.rank import rank_head

# Columns of `lines`, int64 [n, 16]. First what each search says: its place in the batch; rows of the codes
# [START, STOP); rows wanted; row id of row START; where its lines begin in the buffers.
PLACE, START, STOP, N_PICKED, FIRST_ROW, SCORES, PLACES, ROWS = range(8)
# Then what the index says: see `BatchLine.numbers`.
CODES, ROOM_ROWS, OFFSETS, POSITIONS, N_RUNS, CENTROIDS, N_CENTROIDS, UNITS = range(8, 16)
# Columns of tasks, int64 [n_tasks, 3].
LINE, HEAD, CHUNK = range(3)


@jit(parallel=True)
def rank_batch(
    lines: Any, scores: Any, scale: Any, reduction: Any, places: Any, rows: Any, picked: Any, log_norm: Any
) -> Any:
    """Do for each line of `lines` what `rank_heads` does for one sequence.

    lines, scores: as `rope_batch_scan` has them; places int32 [..], scratch, [n_kv_heads, STOP - START + 1] a line from
    PLACES on; rows int64 [..] and picked float32 [..], out, [n_kv_heads, N_PICKED] a line from ROWS on; log_norm
    float32 [n_sequences, n_kv_heads, group], out.
    """
    n_heads, group = log_norm.shape[1:]
    for i in prange(lines.shape[0] * n_heads):
        h, b = divmod(np.int64(i), lines.shape[0])  # prange counts in uint64
        line = lines[b]
        k, n = line[N_PICKED], line[STOP] - line[START]
        own, place, row = scores_of(scores, line, h, group), line[PLACES] + h * (n + 1), line[ROWS] + h * k
        rank_head(
            own[:group], np.float32(scale), reduction, k, line[FIRST_ROW], places[place : place + n + 1], own[group],
            rows[row : row + k], picked[row : row + k], log_norm[line[PLACE], h],
        )  # fmt: skip


@jit
def list_tasks(lines: Any, n_heads: Any) -> Any:
    """List the chunks of rows to scan: int64 [n_tasks, 3].

    Heads outermost: a thread takes tasks that lie side by side, and so gets a share of each sequence, long or short.
    """
    count = 0
    for b in range(lines.shape[0]):
        count += count_chunks(lines[b, STOP] - lines[b, START])
    tasks = np.empty((n_heads * count, 3), np.int64)
    at = 0
    for h in range(n_heads):
        for b in range(lines.shape[0]):
            for chunk in range(count_chunks(lines[b, STOP] - lines[b, START])):
                tasks[at, LINE], tasks[at, HEAD], tasks[at, CHUNK] = b, h, chunk
                at += 1
    return tasks


@jit
def scores_of(scores: Any, line: Any, h: Any, group: Any) -> Any:
    """The scores of one KV head of a line, float32 [group + 1, STOP - START]."""
    n = line[STOP] - line[START]
    first = line[SCORES] + h * (group + 1) * n
    return scores[first : first + (group + 1) * n].reshape(group + 1, n)
