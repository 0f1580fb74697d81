"""Any index that FAISS can make, as codes of keys."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvstore.errors import ConfigError, IndexNotTrainedError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.checks import checked_cut, checked_float, checked_positions
from kvstore.index.faiss_library import load_faiss, one_thread
from kvstore.index.flat_kernels import flat_scan, scan_width
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import FLOAT32, RowView
from kvstore.index.scanned import ScannedIndex
from kvstore.index.threads import run_parallel
from kvstore.index.workspace import Workspace

_WANTED_BY = "an index of kind 'faiss'"

_CHUNK_ROWS = 4096
"""Rows decoded at a time: 1 MiB of keys of 64 dimensions."""

_TRAINING_ROWS = (0, 256, 1024, 4096, 16384, 65536)
"""Numbers of rows tried, in turn, where FAISS wants more of them than there are; they are repeated to get there."""


class FaissIndex(ScannedIndex):
    """One FAISS index a KV head, of any factory string, to compare FAISS' codes within one engine.

    A score is the inner product with the key that FAISS gives back for a row (`reconstruct`). FAISS' own search is
    not used: it ranks one query at a time, while a group needs the scores of all its query heads for all rows, and
    the normaliser of their softmax. So a structure that saves FAISS from looking at rows (IVF, HNSW) saves nothing
    here, an estimator of its own (RaBitQ) is not asked, and a search costs decoding every row.

    FAISS runs on one thread in here; the number of threads that it had is put back. Where FAISS cannot remove rows
    (HNSW), `truncate` adds what it gives back for the rows left once more, which of codes with losses can change a few.

    Args:
        factory: as for `faiss.index_factory`, with inner products as the metric. Rows too few to train on are repeated.
        seed: of FAISS' K-Means. rope: what a store gives to every kind; not used.

    Raises `ConfigError` where FAISS is missing, does not know the string, or cannot train it. Scan
    O(n * (decoding a row + group * head_dim)) a KV head. `clone` copies codebooks too.
    """

    kind: ClassVar[str] = "faiss"

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        factory: str = "PQ4x8",
        first_row: int = 0,
        rope: RopeSpec | None = None,
        seed: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__(n_kv_heads, head_dim, first_row=first_row, workspace=workspace)
        self.factory, self.seed = factory, seed
        self._heads: list[Any] = []
        self._own_bytes = 0
        self._code_bytes = _code_bytes(self._new(), head_dim)

    @property
    def n_rows(self) -> int:
        """Number of rows covered."""
        return int(self._heads[0].ntotal) if self._heads else 0

    @property
    def trained(self) -> bool:
        """Whether `train` was called."""
        return bool(self._heads)

    @property
    def code_bytes_per_key(self) -> float:
        """Bytes of one row's code by FAISS' own account; links of a graph and ids in lists come on top."""
        return float(self._code_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, and of what FAISS learned as it would be written to a file."""
        return self._own_bytes + self.n_kv_heads * self.n_rows * self._code_bytes

    def train(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Let FAISS learn from keys as stored, float32 [n_kv_heads, n, head_dim]; see `Index.train`."""
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        if keys.shape[1] == 0:
            raise ValueError("training needs at least one row")
        checked_positions(positions, keys.shape[1], 0)
        with one_thread(_WANTED_BY) as faiss:
            heads = [self._trained_on(part) for part in keys]
            self._own_bytes = sum(int(faiss.serialize_index(head).nbytes) for head in heads)
        self._heads = heads

    def add(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Append keys as rows; see `Index.add`. Raises `IndexNotTrainedError` before `train`."""
        if not self._heads:
            raise IndexNotTrainedError("FAISS learns from keys first; call train(keys)")
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        checked_positions(positions, keys.shape[1], self.stop_row)
        if keys.shape[1]:
            with one_thread(_WANTED_BY):
                for head, part in zip(self._heads, keys, strict=True):
                    head.add(part)

    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on; what was learned stays."""
        n_rows = checked_cut(stop_row, self.first_row, self.stop_row) - self.first_row
        if n_rows < self.n_rows:
            with one_thread(_WANTED_BY) as faiss:
                for head in self._heads:
                    _cut(faiss, head, n_rows)

    def clone(self) -> FaissIndex:
        """Return an independent index with the same rows; everything is copied. O(n)."""
        twin = object.__new__(FaissIndex)
        twin.__dict__.update(self.__dict__)
        twin._heads = [load_faiss(_WANTED_BY).clone_index(head) for head in self._heads]
        return twin

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index."""
        return {**super().describe(), "factory": self.factory, "seed": self.seed, "trained": self.trained}

    def _score_ns(self, group: int) -> float:
        return self.head_dim * (2.0 + 0.15 * group)

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        group = q.shape[1]
        kernel = flat_scan(self.head_dim, scan_width(group), FLOAT32)
        piece = np.empty((1, group, _CHUNK_ROWS), np.float32)
        with one_thread(_WANTED_BY):
            for h, head in enumerate(self._heads):
                for low in range(start, stop, _CHUNK_ROWS):
                    n = min(_CHUNK_ROWS, stop - low)
                    rows = RowView.of(head.reconstruct_n(low - self.first_row, n)[None])
                    strides = (rows.block_tokens, rows.head_stride_bytes, rows.row_stride_bytes)
                    run_parallel(kernel, rows.block_addresses, *strides, 0, n, 0, q[h : h + 1], piece)
                    out[h, :group, low - start : low - start + n] = piece[0, :, :n]

    def _new(self) -> Any:
        faiss = load_faiss(_WANTED_BY)
        try:
            return faiss.index_factory(self.head_dim, self.factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(f"FAISS makes no {self.factory!r} for head_dim {self.head_dim}: {error}") from error

    def _trained_on(self, keys: FloatArray) -> Any:
        """Return a new index trained on keys [n, head_dim], repeated where FAISS finds them too few."""
        n, complaint = len(keys), ""
        for wanted in _TRAINING_ROWS:
            index = self._new()
            _settle(index, self.seed)
            try:
                index.train(keys if wanted <= n else np.resize(keys, (wanted, self.head_dim)))
            except RuntimeError as error:
                complaint = str(error)
            else:
                return index
        raise ConfigError(f"FAISS cannot train {self.factory!r} on {n} rows: {complaint}")

    def _check(self) -> None:
        assert len(self._heads) in (0, self.n_kv_heads)
        assert all(head.is_trained and head.ntotal == self.n_rows for head in self._heads)


def _cut(faiss: Any, head: Any, n_rows: int) -> None:
    """Keep the first n_rows of a FAISS index."""
    try:
        head.remove_ids(faiss.IDSelectorRange(n_rows, head.ntotal))
    except RuntimeError:  # this kind cannot remove
        kept = head.reconstruct_n(0, n_rows) if n_rows else None
        head.reset()
        if kept is not None:
            head.add(kept)


def _code_bytes(index: Any, head_dim: int) -> int:
    try:
        return int(index.sa_code_size())
    except RuntimeError:  # a graph: it holds the keys as they are
        return 4 * head_dim


def _settle(index: Any, seed: int) -> None:
    """Seed the K-Means of an index and keep it from printing warnings about few rows, where it has one."""
    inner = load_faiss(_WANTED_BY).downcast_index(index)
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False  # reorders centroids for a search that is not used; half a second a head
    for owner in (inner, getattr(inner, "pq", None)):
        settings = getattr(owner, "cp", None)
        if settings is not None:
            settings.seed = seed + 1
            settings.min_points_per_centroid = 1
