"""The product-quantization index."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import IndexNotTrainedError, InvalidQueryError, SchemaMismatchError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.batch_line import BatchLine
from kvstore.index.checks import checked_float, checked_positions
from kvstore.index.code_rows import CodeRows
from kvstore.index.codebook import Codebook
from kvstore.index.coder import Coder
from kvstore.index.distortion import held_out_errors
from kvstore.index.layout import Layout
from kvstore.index.packed_rows import PackedRows
from kvstore.index.pq_settings import RAW, ROPE, check_space, checked_scan_pairs, checked_weighting
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import RowView
from kvstore.index.runs import Runs
from kvstore.index.scanned import ScannedIndex
from kvstore.index.trainers import NUMBA, checked_trainer
from kvstore.index.weighting import Weighting
from kvstore.index.workspace import Workspace


class PQIndex(ScannedIndex):
    """Codes of a few bits instead of keys: each of m sub-spaces of a key is replaced by its nearest centroid.

    `space="raw"` codes keys as they are stored (PQCache, arXiv 2407.12820, section 3.2). `space="rope"` undoes
    RoPE first, so that codes do not depend on positions, and turns the query instead: a codebook of rotated keys
    is one of the positions that it has seen. Sizes default to 1 sub-space of 8 bits for "rope", to 2 of 6 bits
    for "raw".

    Args:
        m, bits: sub-spaces, and bits of a code (1 to 8); `m * bits / 8` bytes a key (2 x 6: 1.5), rounded up as
            `Layout` says.
        space: "raw" or "rope"; by default "rope" where a `rope` is given.
        rope: the model's RoPE, needed for "rope"; for "raw" it says which dimensions are pairs.
        pairs: whether sub-spaces hold whole RoPE pairs (better, free), or contiguous dimensions as in the paper.
        scan_pairs: RoPE pairs that a search in the rope space looks at, those with the most energy for the query; None
            for all. A multiple of m. Fewer are faster and rank a little worse, which an exact rerank mends.
        iterations: of K-Means, at most. sample_per_centroid: rows looked at, at most, for each centroid.
        weighting: "queries" codes keys in the metric of the queries, if `train` is told of any; see `Weighting`.
        trainer: "numba", or "faiss" to let FAISS run K-Means, for comparison.
        codebook: centroids made elsewhere, shared and not counted in `nbytes`; otherwise call `train`.

    Raises `ConfigError` for settings that do not fit each other, `SchemaMismatchError` for a codebook that does
    not fit them. The same seed and rows give the same bits with any number of threads.
    """

    kind: ClassVar[str] = "pq"

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        m: int | None = None,
        bits: int | None = None,
        space: str | None = None,
        rope: RopeSpec | None = None,
        pairs: bool = True,
        scan_pairs: int | None = None,
        first_row: int = 0,
        iterations: int = 5,
        sample_per_centroid: int = 256,
        weighting: str | None = None,
        trainer: str = NUMBA,
        seed: int = 0,
        codebook: Codebook | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__(n_kv_heads, head_dim, first_row=first_row, workspace=workspace)
        self.space = space if space is not None else (ROPE if rope is not None else RAW)
        check_space(self.space, rope, pairs, iterations, sample_per_centroid)
        m = m if m is not None else (1 if self.space == ROPE else 2)
        bits = bits if bits is not None else (8 if self.space == ROPE else 6)
        self.layout = Layout.of(head_dim, m, bits, pairs, rope)
        self.trainer = checked_trainer(trainer)
        self.weighting = checked_weighting(weighting)
        self.iterations, self.sample_per_centroid, self.seed = iterations, sample_per_centroid, seed
        self.scan_pairs = checked_scan_pairs(scan_pairs, self.space, m, head_dim)
        self._coder = Coder(self.layout, rope if self.space == ROPE else None, self.scan_pairs)
        self._codebook = codebook.checked(n_kv_heads, self.layout) if codebook is not None else None
        self._owns_codebook = False
        self._runs = Runs()
        self._codes = self._no_codes()
        self._line: BatchLine | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows covered."""
        return self._runs.n_rows

    @property
    def trained(self) -> bool:
        """Whether there is a codebook."""
        return self._codebook is not None

    @property
    def codebook(self) -> Codebook:
        """The codebook; raises `IndexNotTrainedError` when there is none yet."""
        if self._codebook is None:
            raise IndexNotTrainedError("the index has no codebook; call train(keys) or pass codebook=")
        return self._codebook

    @property
    def code_bytes_per_key(self) -> float:
        """Bytes of codes that one key of one KV head takes."""
        return self._codes.bytes_per_key

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, allocated room included, and the codebook if this index trained it."""
        own = self._codebook.nbytes if self._codebook is not None and self._owns_codebook else 0
        return self._codes.nbytes + own

    @property
    def codes(self) -> npt.NDArray[Any]:
        """Words of the rows covered, uint8 or uint16 [n_kv_heads, n_rows, n_words]; read-only, a copy where packed."""
        view = self._codes.words(self.n_rows).view()
        view.flags.writeable = False
        return view

    @property
    def positions(self) -> IntArray:
        """RoPE positions of the rows covered, int64 [n_rows]."""
        return self._runs.at(np.arange(self.n_rows))

    def train(
        self,
        keys: FloatArray,
        positions: IntArray | None = None,
        *,
        warm: bool = False,
        moments: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Learn the codebook from keys as stored, float32 [n_kv_heads, n, head_dim]; see `Index.train`.

        With `warm`, K-Means starts from the present codebook, in its metric. `moments` are those of queries (see
        `query_moments`), used by weighting="queries". Fewer rows than centroids give fewer centroids.
        O(iterations * min(n, sample_per_centroid * k) * k * head_dim) a KV head.
        """
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        if keys.shape[1] == 0:
            raise ValueError("training needs at least one row")
        positions = checked_positions(positions, keys.shape[1], 0)
        weighting = self.codebook.weighting if warm else self._weighting_of(moments)
        centroids = self._coder.train(
            _weighted(keys, weighting),
            positions,
            iterations=self.iterations,
            sample_per_centroid=self.sample_per_centroid,
            seed=self.seed,
            start=self.codebook if warm else None,
            trainer=self.trainer,
        )
        self._codebook, self._owns_codebook = Codebook(centroids, weighting), True
        self._runs, self._codes = Runs(), self._no_codes()

    def add(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Code the keys with their nearest centroids and append them as rows; see `Index.add`.

        O(n * k * head_dim) a KV head. Raises `IndexNotTrainedError` without a codebook.
        """
        codebook = self.codebook
        keys = checked_float(keys, self.n_kv_heads, self.head_dim, "keys")
        positions = checked_positions(positions, keys.shape[1], self.stop_row)
        self._append(self._coder.encode(_weighted(keys, codebook.weighting), positions, codebook), positions)

    def add_codes(self, codes: npt.NDArray[Any], positions: IntArray | None = None) -> None:
        """Append rows whose words are known, [n_kv_heads, n, n_words]: another index's `codes`, or those of a file.

        They must come from the same codebook. Raises `SchemaMismatchError` for another shape or dtype, or for a
        code without a centroid.
        """
        n_words, dtype = self.layout.n_words, np.dtype(self.layout.word_dtype)
        if codes.ndim != 3 or codes.shape[::2] != (self.n_kv_heads, n_words) or codes.dtype != dtype:
            raise SchemaMismatchError(
                f"codes must be {dtype} [{self.n_kv_heads}, n, {n_words}], not {codes.dtype} {list(codes.shape)}"
            )
        self._coder.check_codes(codes, self.codebook)
        self._append(codes, checked_positions(positions, codes.shape[1], self.stop_row))

    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on; the codebook stays."""
        if not self.first_row <= stop_row <= self.stop_row:
            raise InvalidQueryError(
                f"cannot truncate to row {stop_row}: covered are [{self.first_row}, {self.stop_row})"
            )
        self._runs.truncate(stop_row - self.first_row)

    def clone(self) -> PQIndex:
        """Return an independent index with the same rows; the codebook is shared, codes are copied. O(n)."""
        twin = object.__new__(PQIndex)
        twin.__dict__.update(self.__dict__)
        twin._runs = self._runs.clone()
        twin._codes = self._codes.copy(self.n_rows)
        return twin

    def decode(self, head: int, rows: IntArray) -> FloatArray:
        """Return the keys that the codes of row ids stand for, as stored: float32 [n, head_dim]."""
        offsets = np.asarray(rows, np.int64) - self.first_row
        if not 0 <= head < self.n_kv_heads or (len(offsets) and not 0 <= offsets.min() <= offsets.max() < self.n_rows):
            raise InvalidQueryError(
                f"head must be below {self.n_kv_heads}, rows in [{self.first_row}, {self.stop_row})"
            )
        codebook = self.codebook
        keys = self._coder.decode(self._codes.at(head, offsets), self._runs.at(offsets), codebook, head)
        return keys if codebook.weighting is None else codebook.weighting.stored(keys, head)

    def errors(self, keys: FloatArray, rows: IntArray, *, held_out: bool = False) -> FloatArray:
        """Return |key - decoded|^2 of covered rows: keys [n_kv_heads, n, head_dim] of row ids int64 [n] -> [.., n].

        In the space that is coded, RoPE undone and weighted. `held_out` says what it would be without these rows in
        the training, for an index that covers the rows it was trained on (see `held_out_errors`);
        O(n_rows + n * k * head_dim).
        """
        offsets = np.asarray(rows, np.int64) - self.first_row
        codebook = self.codebook
        parts = self._coder.arranged(_weighted(keys, codebook.weighting), self._runs.at(offsets))
        own = self._coder.unpack(self._codes.at(slice(None), offsets))
        heads = np.arange(self.n_kv_heads)
        out = np.empty((self.n_kv_heads, len(offsets)), np.float32)
        if not held_out:
            decoded = codebook.laid[heads[:, None, None], np.arange(self.layout.m), :, own]
            np.square(parts - decoded).sum(axis=(2, 3), out=out)
            return out
        codes = self.codes
        for h in heads:
            everyone = self._coder.unpack(codes[h])
            counts = np.array([np.bincount(column, minlength=codebook.k) for column in everyone.T])
            out[h] = held_out_errors(parts[h], own[h], counts, codebook.laid[h, ..., : codebook.k])
        return out

    def batch_line(self) -> BatchLine | None:
        """Return what `search_batch` reads; None where this index must be searched by itself."""
        codes, runs, codebook = self._codes.array, self._runs, self._codebook
        if self._line is None or not self._line.fits(codes, runs, codebook):
            is_plain = codebook is not None and codebook.weighting is None and self._coder.batch_key is not None
            self._line = BatchLine(self._coder, codes, runs, self.codebook) if is_plain else None
        return self._line

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index."""
        settings: dict[str, Any] = {"m": self.layout.m, "bits": self.layout.bits, "space": self.space}
        if 2 * self.scan_pairs < self.head_dim:
            settings["scan_pairs"] = self.scan_pairs
        if self.weighting is not None:
            seen = self.trained and self.codebook.weighting is not None
            settings["weighting"] = self.weighting if seen else "none, no queries seen"
        return {**super().describe(), **settings, "pairs": self.layout.paired, "trained": self.trained}

    def _score_ns(self, group: int) -> float:
        return self._coder.score_ns(group)

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        first, codebook = self.first_row, self.codebook
        if codebook.weighting is not None:
            q = codebook.weighting.queries(q)
        self._coder.scan(self._codes.array, self._runs, codebook, start - first, stop - first, q, out, self._workspace)

    def _weighting_of(self, moments: npt.NDArray[np.float64] | None) -> Weighting | None:
        if self.weighting is None or moments is None:
            return None
        if self.space == RAW:
            found = Weighting.full(moments)
        else:
            first, second = np.split(self.layout.order_array.reshape(self.layout.m, -1), 2, axis=1)
            found = Weighting.of_pairs(moments, first.ravel(), second.ravel())
        return found.checked(self.n_kv_heads, self.head_dim)

    def _append(self, codes: npt.NDArray[Any], positions: IntArray) -> None:
        self._codes.write(self.n_rows, codes)
        self._runs.append(positions)

    def _no_codes(self) -> CodeRows:
        """Packed where a scan reads words in bulk; before RoPE it reads a key's codes at a time."""
        packed = self.space == RAW and self.layout.packable
        return (PackedRows if packed else CodeRows)(self.n_kv_heads, self.layout)

    def _check(self) -> None:
        assert self._codes.room_rows >= self.n_rows
        assert self.trained or self.n_rows == 0
        offsets = self._runs.offsets
        assert (np.diff(offsets) > 0).all()
        assert (self.n_rows == 0) == (len(offsets) == 0)
        assert len(offsets) == 0 or (offsets[0] == 0 and offsets[-1] < self.n_rows)
        if self.trained:
            self._codebook_fits()

    def _codebook_fits(self) -> None:
        self.codebook.checked(self.n_kv_heads, self.layout)
        self._coder.check_codes(self.codes, self.codebook)


def _weighted(keys: FloatArray, weighting: Weighting | None) -> FloatArray:
    return keys if weighting is None else weighting.keys(keys)
