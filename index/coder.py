"""Between keys and codes: training, encoding, decoding and scanning of one layout."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import SchemaMismatchError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.batch_raw_kernels import raw_batch_scan
from kvstore.index.batch_rope_kernels import rope_batch_scan
from kvstore.index.clustering import draw_sample, draw_starts
from kvstore.index.codebook import Codebook
from kvstore.index.encode_kernels import encode_heads, encode_rows, train_heads
from kvstore.index.flat_kernels import scan_width
from kvstore.index.layout import Layout
from kvstore.index.phases import position_phases, rope_tables
from kvstore.index.pq_raw_kernels import raw_scan, table_size
from kvstore.index.pq_rope_kernels import rope_scan
from kvstore.index.rope import RopeSpec
from kvstore.index.runs import Runs
from kvstore.index.scan_subset import all_pairs, best_pairs
from kvstore.index.threads import run_parallel
from kvstore.index.trainers import FAISS, faiss_sets
from kvstore.index.workspace import Workspace

_PARALLEL_ROWS = 1024
"""Rows of all heads together from which waking other threads pays."""


class Coder:
    """Arranges, codes and scores keys of one layout, after undoing RoPE if a spec is given; holds no rows.

    Arrays are trusted to be checked: float32, C-order, finite. `scan_pairs` are the RoPE pairs that a scan reads, of
    head_dim / 2, the same number in each sub-space.
    """

    def __init__(self, layout: Layout, rope: RopeSpec | None, scan_pairs: int) -> None:
        self._layout = _interned(layout)
        self._scan_pairs = scan_pairs
        self._order = layout.order_array
        self._tables = rope_tables(rope, layout.head_dim) if rope is not None else None
        gains = self._tables.gains if self._tables is not None else np.ones(layout.head_dim // 2)
        self._inverse_gains = (1.0 / gains).astype(np.float32)

    def train(
        self,
        keys: FloatArray,
        positions: IntArray,
        *,
        iterations: int,
        sample_per_centroid: int,
        seed: int,
        start: Codebook | None,
        trainer: str,
    ) -> FloatArray:
        """Return centroids float32 [n_kv_heads, m, k, sub_dim] for keys float32 [n_kv_heads, n, head_dim].

        Every KV head starts from the same rows, so its centroids do not depend on the heads beside it: the store of a
        part of a model's heads has the codebooks that the store of all of them has.
        """
        heads, n, _ = keys.shape
        layout = self._layout
        sample = draw_sample(n, sample_per_centroid * layout.n_centroids, seed)
        k = min(layout.n_centroids, n) if start is None else start.k
        if trainer == FAISS:
            return self._train_by_faiss(keys[:, sample], positions[sample], k, iterations, seed, start)
        if start is None:
            starts = np.tile(draw_starts(layout.m, len(sample), k, seed), (heads, 1))
            centroids = np.empty((heads, layout.m, k, layout.sub_dim), np.float32)
        else:
            starts, centroids = np.empty((0, k), np.int64), start.centroids
        turns = self._turns(positions[sample])
        run_parallel(
            train_heads, keys, sample, self._order, turns, self._inverse_gains, starts, start is not None,
            iterations, centroids,
        )  # fmt: skip
        return centroids

    def _train_by_faiss(
        self, keys: FloatArray, positions: IntArray, k: int, iterations: int, seed: int, start: Codebook | None
    ) -> FloatArray:
        """Return what `train` does, for the sampled keys."""
        parts = self.arranged(keys, positions).swapaxes(1, 2)
        given = [None] * len(parts) if start is None else start.centroids
        found = [faiss_sets(part, k, iterations, seed, init) for part, init in zip(parts, given, strict=True)]
        return np.array(found, np.float32)

    def encode(self, keys: FloatArray, positions: IntArray, codebook: Codebook) -> npt.NDArray[Any]:
        """Return the words of keys float32 [n_kv_heads, n, head_dim]: [n_kv_heads, n, n_words]."""
        heads, n, _ = keys.shape
        layout = self._layout
        codes = np.empty((heads, n, layout.n_words), layout.word_dtype)
        shared = (self._order, self._turns(positions), self._inverse_gains)
        if heads * n >= _PARALLEL_ROWS:
            run_parallel(
                encode_heads, keys, *shared, codebook.laid, codebook.offsets, layout.bits, layout.per_word, codes
            )
        else:
            for h in range(heads if n else 0):
                encode_rows(
                    keys[h], *shared, codebook.laid[h], codebook.offsets[h], layout.bits, layout.per_word,
                    0, n, codes[h],
                )  # fmt: skip
        return codes

    def decode(self, words: npt.NDArray[Any], positions: IntArray, codebook: Codebook, head: int) -> FloatArray:
        """Return keys as stored, float32 [n, head_dim], for words [n, n_words] at positions int64 [n]."""
        layout = self._layout
        codes = self.unpack(words)
        parts = [codebook.parts(head, j, codes[:, j]) for j in range(layout.m)]
        if self._tables is not None:
            turns = position_phases(self._tables, positions) * self._tables.gains.astype(np.float32)
            cosines, sines = turns.reshape(2, len(words), layout.m, -1)
            halves = [np.split(part, 2, axis=1) for part in parts]
            parts = [
                np.concatenate([x * cosines[:, j] - y * sines[:, j], x * sines[:, j] + y * cosines[:, j]], 1)
                for j, (x, y) in enumerate(halves)
            ]
        keys = np.empty((len(words), layout.head_dim), np.float32)
        keys[:, self._order] = np.concatenate(parts, 1)
        return keys

    def score_ns(self, group: int) -> float:
        """Rough nanoseconds to score one row for a group of query heads."""
        if self._tables is None:
            return 0.4 * self._layout.n_words * group
        return 0.03 * self._scan_pairs * group

    def scan(
        self,
        codes: npt.NDArray[Any],
        runs: Runs,
        codebook: Codebook,
        start: int,
        stop: int,
        q: FloatArray,
        out: FloatArray,
        workspace: Workspace,
    ) -> None:
        """Write the scores of row offsets [start, stop) to out, float32 [n_kv_heads, >= group, >= stop - start]."""
        layout = self._layout
        tables = self._tables
        if tables is None:
            kernel = raw_scan(layout.m, layout.bits, layout.per_word, layout.packable)
            products = workspace.buffer("products", (*q.shape[:2], table_size(layout)), np.float32)
            run_parallel(kernel, codes, codebook.laid, self._order, start, stop, q, products, out)
        else:
            used, n_pairs = all_pairs(codebook.short.table, self._order, tables), self._scan_pairs // layout.m
            if 2 * n_pairs < layout.sub_dim:
                used = best_pairs(used, self._energy(codebook), q, n_pairs, workspace)
            kernel = rope_scan(n_pairs, layout.m, scan_width(q.shape[1]), layout.bits, layout.per_word)
            run_parallel(
                kernel, codes, used.centroids, codebook.short.units, np.float32(tables.gain), used.order,
                runs.offsets, runs.positions, used.angles, used.coarse, used.fine, start, stop, q, out,
            )  # fmt: skip

    @property
    def batch_key(self) -> tuple[int, int] | None:
        """What coders must have in common for `scan_batch`; None where a scan looks at some of the pairs only."""
        is_whole = 2 * self._scan_pairs == self._layout.head_dim or self._tables is None
        return (id(self._layout), id(self._tables)) if is_whole else None

    def batch_centroids(self, codebook: Codebook) -> tuple[int, int, int]:
        """Return address and number of the centroids of one sub-space and KV head, as `scan_batch` reads them.

        And the address of their units, where they are `ShortCentroids`.
        """
        if self._tables is None:
            return codebook.laid.ctypes.data, codebook.laid.shape[3], 0
        return codebook.short.table.ctypes.data, codebook.k, codebook.short.units.ctypes.data

    def scan_batch(self, lines: IntArray, q: FloatArray, out: FloatArray, workspace: Workspace) -> None:
        """Write the scores of several indexes whose coders have this one's `batch_key`.

        lines, q and out are as `rope_batch_scan` says.
        """
        layout, tables = self._layout, self._tables
        if tables is None:
            raw = raw_batch_scan(layout.m, layout.bits, layout.per_word, layout.packable)
            shape = (len(lines), *q.shape[1:3], table_size(layout))
            run_parallel(raw, lines, self._order, q, workspace.buffer("batch products", shape, np.float32), out)
        else:
            sizes = layout.sub_dim // 2, layout.m, scan_width(q.shape[2]), layout.bits, layout.per_word
            shared = np.float32(tables.gain), self._order, tables.angles, tables.scan_coarse, tables.scan
            run_parallel(rope_batch_scan(*sizes), lines, *shared, q, out)

    def _energy(self, codebook: Codebook) -> FloatArray:
        """Root mean square of the pairs of centroids, RoPE's gain included, float32 [n_kv_heads, m, n_pairs]."""
        return codebook.pair_lengths / self._inverse_gains.reshape(self._layout.m, -1)

    def check_codes(self, words: npt.NDArray[Any], codebook: Codebook) -> None:
        """Raise `SchemaMismatchError` when a word names a centroid that the codebook does not have."""
        k, layout = codebook.k, self._layout
        full = k == layout.n_centroids and layout.per_word * layout.bits in (8, 16)
        if not full and words.size:
            largest = int(self.unpack(words).max())
            if largest >= k:
                raise SchemaMismatchError(f"code {largest} is not below the number of centroids, {k}")

    def arranged(self, keys: FloatArray, positions: IntArray) -> FloatArray:
        """Return keys as they are coded, RoPE undone: [.., n, head_dim] at int64 [n] -> float32 [.., n, m, sub_dim]."""
        layout = self._layout
        parts: FloatArray = keys[..., self._order].reshape(*keys.shape[:-1], layout.m, layout.sub_dim)
        if self._tables is None:
            return parts
        cosines, sines = self._turns(positions).reshape(2, len(positions), layout.m, -1)
        gains = self._inverse_gains.reshape(layout.m, -1)
        x, y = np.split(parts, 2, axis=-1)
        return np.concatenate([x * cosines + y * sines, y * cosines - x * sines], -1) * np.tile(gains, 2)

    def _turns(self, positions: IntArray) -> FloatArray:
        if self._tables is None:
            return np.empty((2, 0, 0), np.float32)
        return position_phases(self._tables, positions)

    def unpack(self, words: npt.NDArray[Any]) -> IntArray:
        """Return the codes of words [..., n_words] as int64 [..., m]."""
        layout = self._layout
        places = np.arange(layout.m)
        shifts = layout.bits * (places % layout.per_word)
        codes: IntArray = (words[..., places // layout.per_word].astype(np.int64) >> shifts) & (2**layout.bits - 1)
        return codes


@functools.lru_cache(maxsize=64)
def _interned(layout: Layout) -> Layout:
    """Return one layout for all that are equal, so that identity tells them apart: comparing takes longer."""
    return layout
