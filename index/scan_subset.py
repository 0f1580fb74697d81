"""Scanning only the RoPE pairs that matter for a query.

A pair of dimensions matters as far as the query and the centroids have energy in it: the sum over the group's heads of
|q_i|, times the root mean square of |c_i|. Each KV head's best pairs, their columns of the codebook and of the tables
are copied out once a query, so that the scan itself is as if keys had only these; an exact rerank mends the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange

from kvstore.index.base import FloatArray, IntArray
from kvstore.index.jit import jit
from kvstore.index.phases import RopeTables
from kvstore.index.threads import run_parallel
from kvstore.index.workspace import Workspace

ShortArray = npt.NDArray[np.int16]


class ScanTables(NamedTuple):
    """What a scan before RoPE needs besides codes and queries; see `rope_scan`."""

    centroids: ShortArray
    order: IntArray
    angles: npt.NDArray[np.float64]
    coarse: FloatArray
    fine: ShortArray


def all_pairs(centroids: ShortArray, order: IntArray, tables: RopeTables) -> ScanTables:
    """Return the tables of a scan of every pair, shared by all heads; nothing is copied."""
    return ScanTables(centroids, order[None], tables.angles[None], tables.scan_coarse[None], tables.scan[None])


def best_pairs(whole: ScanTables, energy: FloatArray, q: FloatArray, n_keep: int, workspace: Workspace) -> ScanTables:
    """Return the tables cut to the n_keep pairs of each sub-space and KV head that matter most for q.

    energy: float32 [n_kv_heads, m, n_pairs], root mean square of the centroids' pairs, gains included; q float32
    [n_kv_heads, group, head_dim]. The arrays are the workspace's: valid until the next call. O(k * m * n_keep) a head.
    """
    heads, m, k, _ = whole.centroids.shape
    width, lines = m * n_keep, whole.fine.shape[2]
    cut = ScanTables(
        workspace.buffer("centroids", (heads, m, k, 2 * n_keep), np.int16),
        workspace.buffer("order", (heads, 2 * width), np.int64),
        workspace.buffer("angles", (heads, width), np.float64),
        workspace.buffer("coarse", (heads, 2, whole.coarse.shape[2], width), np.float32),
        workspace.buffer("fine", (heads, 2, lines, width), np.int16),
    )
    run_parallel(_cut_heads, *whole, energy, q, *cut)
    return cut


@jit(parallel=True)
def _cut_heads(
    centroids: Any, order: Any, angles: Any, coarse: Any, fine: Any, energy: Any, q: Any,
    out_centroids: Any, out_order: Any, out_angles: Any, out_coarse: Any, out_fine: Any,
) -> Any:  # fmt: skip
    """Cut the tables of all heads; shapes as in `best_pairs`."""
    m, n_pairs = energy.shape[1:]
    n_keep = out_centroids.shape[3] // 2
    for h in prange(energy.shape[0]):
        kept = np.empty(m * n_keep, np.int64)
        for j in range(m):
            part = order[0, 2 * j * n_pairs : 2 * (j + 1) * n_pairs]
            mine = kept[j * n_keep : (j + 1) * n_keep]
            _choose_pairs(energy[h, j], q[h], part, mine)
            for i in range(n_keep):
                out_order[h, 2 * j * n_keep + i] = part[mine[i]]
                out_order[h, (2 * j + 1) * n_keep + i] = part[mine[i] + n_pairs]
            _copy_columns(centroids[h, j], mine, 0, out_centroids[h, j, :, :n_keep])
            _copy_columns(centroids[h, j], mine, n_pairs, out_centroids[h, j, :, n_keep:])
            mine += j * n_pairs
        for i in range(m * n_keep):
            out_angles[h, i] = angles[0, kept[i]]
        for half in range(2):
            _copy_columns(coarse[0, half], kept, 0, out_coarse[h, half])
            _copy_columns(fine[0, half], kept, 0, out_fine[h, half])


@jit
def _choose_pairs(energy: Any, q: Any, order: Any, out: Any) -> Any:
    """Write the pairs of a sub-space with the most energy, ascending: energy [n_pairs], q [group, head_dim]."""
    n_pairs = energy.shape[0]
    weights = np.empty(n_pairs, np.float32)
    for i in range(n_pairs):
        length = np.float32(0)
        for g in range(q.shape[0]):
            x, y = q[g, order[i]], q[g, order[i + n_pairs]]
            length += np.sqrt(x * x + y * y)
        weights[i] = length * energy[i]
    ranked = np.argsort(-weights, kind="mergesort")  # stable: the same pairs for the same query, always
    out[:] = np.sort(ranked[: out.shape[0]])


@jit
def _copy_columns(source: Any, columns: Any, shift: Any, out: Any) -> Any:
    """out[:, i] = source[:, shift + columns[i]]."""
    for row in range(source.shape[0]):
        for i in range(columns.shape[0]):
            out[row, i] = source[row, shift + columns[i]]
