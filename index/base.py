"""The contract that every kind of index keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.index.rows import RowView

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a search found, one line of rows a KV head.

    Attributes:
        rows: int64 [n_kv_heads, k], row ids of the table, ascending in each line, without duplicates.
        scores: float32 [n_kv_heads, k], the group scores the rows were chosen by (see `Index.search`).
        log_norm: float32 [n_kv_heads, group], log of the sum of exp(scale * score) over all rows searched,
            so that the caller can merge the softmax with rows that it scored itself.
    """

    rows: IntArray
    scores: FloatArray
    log_norm: FloatArray

    @classmethod
    def room(cls, n_kv_heads: int, group: int, k: int) -> Candidates:
        """Return uninitialised arrays for an answer of k rows."""
        return cls(
            np.empty((n_kv_heads, k), np.int64),
            np.empty((n_kv_heads, k), np.float32),
            np.empty((n_kv_heads, group), np.float32),
        )


class Index(ABC):
    """A secondary index over the keys of one table, all KV heads of one layer.

    An index covers the rows `[first_row, stop_row)` of its table. Rows enter at the end (`add`) and leave
    at the end (`truncate`). Row ids are those of the table; they never change. The index knows nothing of
    the store: keys come in as float32 arrays, and where a kind reads rows at search time (`needs_rows`) they
    come as a `RowView`.
    """

    kind: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether scores are exact inner products, so that a rerank would change nothing."""
    needs_rows: ClassVar[bool] = False
    """Whether `scores` and `search` read the table's keys, so that they must be given a view of them."""

    def __init__(self, n_kv_heads: int, head_dim: int, *, first_row: int = 0) -> None:
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.first_row = first_row

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Number of rows covered."""

    @property
    def stop_row(self) -> int:
        """One past the last row covered."""
        return self.first_row + self.n_rows

    @property
    @abstractmethod
    def trained(self) -> bool:
        """Whether rows can be added (a kind without training always says yes)."""

    @property
    @abstractmethod
    def code_bytes_per_key(self) -> float:
        """Bytes of codes that one key of one KV head takes."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held: codes of all heads, allocated room included, and codebooks of its own."""

    @abstractmethod
    def train(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Learn a codebook from keys, float32 [n_kv_heads, n, head_dim], as they are stored (after RoPE).

        `positions` are the RoPE positions of the rows, int64 [n] (default 0, 1, 2, ...); kinds that keep keys
        as they are ignore them. Raises `ValueError` for n = 0 or a wrong shape, `NonFiniteError` for NaN or
        infinity. Rows covered before are dropped.
        """

    @abstractmethod
    def add(self, keys: FloatArray, positions: IntArray | None = None) -> None:
        """Encode keys, float32 [n_kv_heads, n, head_dim], and append them as rows `stop_row` and on.

        `positions` defaults to the row ids. n = 0 is allowed and does nothing.
        """

    @abstractmethod
    def truncate(self, stop_row: int) -> None:
        """Forget the rows from `stop_row` on; the codebook stays."""

    @abstractmethod
    def clone(self) -> Index:
        """Return an independent index with the same rows; codebooks, which never change, are shared."""

    @abstractmethod
    def scores(
        self, q: FloatArray, view: RowView | None = None, *, start: int | None = None, stop: int | None = None
    ) -> FloatArray:
        """Return q . key as the index sees it, float32 [n_kv_heads, group, stop - start].

        q is float32 [n_kv_heads, group, head_dim];
        `start` and `stop` are row ids inside the coverage (default: all of it).
        """

    @abstractmethod
    def search(
        self,
        q: FloatArray,
        k: int,
        view: RowView | None = None,
        *,
        scale: float,
        reduce: str = "sum_softmax",
        start: int | None = None,
        stop: int | None = None,
        out: Candidates | None = None,
    ) -> Candidates:
        """Return, for each KV head, the k rows of `[start, stop)` with the largest group scores.

        q is float32 [n_kv_heads, group, head_dim]. A row's group score is, over the group's query heads g,

        - `"sum_softmax"`: sum over g of softmax over the rows of scale * score[g] (PQCache, arXiv 2407.12820,
          section 3.2),
        - `"max"` or `"mean"`: max or mean over g of score[g].

        Ties go to the lower row. k above the number of rows returns them all. O(n) a head, no sort.

        The answer is written to `out` and that returned, where given: C-order arrays of the shapes and dtypes above, k
        being at most the number of rows. With one workspace and answers of one size nothing of the size of rows or
        keys is then allocated. Raises `SchemaMismatchError` for other arrays.
        """

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index: kind and settings."""
        return {"kind": self.kind, "rows": self.n_rows, "bytes_per_key": self.code_bytes_per_key}

    @abstractmethod
    def _check(self) -> None:
        """Assert the invariants; O(n). For tests and post-mortems."""
