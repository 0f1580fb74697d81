"""An index of several parts, each with a codebook of its own: one for each input of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvstore.errors import InvalidQueryError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.codebook import Codebook
from kvstore.index.rows import RowView
from kvstore.index.scanned import ScannedIndex
from kvstore.index.workspace import Workspace


class SegmentedIndex(ScannedIndex):
    """Consecutive indexes seen as one; rows enter at the end of the last.

    PQCache's second way for several turns (arXiv 2407.12820, section 3.4): what a turn brings is indexed by itself, and
    the codes of the answer are added to it. Rows are scored by their own segment's codebook and ranked together, which
    is right as far as the codebooks' errors are alike. O(n) a search, as for one index.

    Args:
        segments: of one kind, trained, none of them empty but perhaps the last; each begins where the one before ends.
    """

    kind: ClassVar[str] = "segments"

    def __init__(self, segments: Sequence[Any], *, workspace: Workspace | None = None) -> None:
        first = segments[0]
        super().__init__(first.n_kv_heads, first.head_dim, first_row=first.first_row, workspace=workspace)
        self.segments = list(segments)

    @property
    def n_rows(self) -> int:
        """Number of rows covered."""
        return int(sum(segment.n_rows for segment in self.segments))

    @property
    def trained(self) -> bool:
        """Always true: each segment is trained before it is made part."""
        return True

    @property
    def code_bytes_per_key(self) -> float:
        """Bytes of codes that one key of one KV head takes."""
        return float(self.segments[-1].code_bytes_per_key)

    @property
    def nbytes(self) -> int:
        """Bytes held: codes of all segments and their codebooks."""
        return int(sum(segment.nbytes for segment in self.segments))

    @property
    def codebook(self) -> Codebook:
        """Codebook of the last segment, which codes what is added."""
        found: Codebook = self.segments[-1].codebook
        return found

    def train(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Train one segment anew and forget the others; see `Index.train`."""
        self.segments[0].train(keys, positions)
        del self.segments[1:]

    def add(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Code the keys with the last segment's codebook and append them; see `Index.add`."""
        self.segments[-1].add(keys, positions)

    def errors(self, keys: FloatArray, rows: IntArray, **options: Any) -> FloatArray:
        """Squared error of the codes of rows of the last segment; see `PQIndex.errors`."""
        found: FloatArray = self.segments[-1].errors(keys, rows, **options)
        return found

    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on, and segments that hold none then."""
        if not self.first_row <= stop_row <= self.stop_row:
            raise InvalidQueryError(
                f"cannot truncate to row {stop_row}: covered are [{self.first_row}, {self.stop_row})"
            )
        while len(self.segments) > 1 and self.segments[-1].first_row >= stop_row:
            del self.segments[-1]
        self.segments[-1].truncate(stop_row)

    def clone(self) -> SegmentedIndex:
        """Return an independent index with the same rows; codebooks are shared."""
        return SegmentedIndex([segment.clone() for segment in self.segments], workspace=self._workspace)

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints: the last segment's settings, all rows, how many segments."""
        return {**self.segments[-1].describe(), "rows": self.n_rows, "segments": len(self.segments)}

    def _score_ns(self, group: int) -> float:
        return float(self.segments[-1]._score_ns(group))

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        for segment in self.segments:
            low, high = max(start, segment.first_row), min(stop, segment.stop_row)
            if low < high:  # kernels write lines without gaps, of which `out` takes its part
                part = np.empty((self.n_kv_heads, q.shape[1], high - low), np.float32)
                segment._scan(q, view, low, high, part)
                out[:, : q.shape[1], low - start : high - start] = part

    def _check(self) -> None:
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            assert segment.stop_row == following.first_row
            assert segment.n_rows > 0
        for segment in self.segments:
            segment._check()
