"""An index that knows nothing: the control beside which any real one must look good."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvstore.index.base import FloatArray
from kvstore.index.flat import FlatIndex
from kvstore.index.rows import RowView

KIND = "random"


class RandomIndex(FlatIndex):
    """Scores rows by chance, so that a search returns k random rows."""

    kind: ClassVar[str] = KIND
    exact: ClassVar[bool] = False

    def __init__(self, n_kv_heads: int, head_dim: int, *, first_row: int = 0, seed: int = 0, **_: Any) -> None:
        super().__init__(n_kv_heads, head_dim, first_row=first_row)
        self._random = np.random.default_rng(seed)

    def clone(self) -> RandomIndex:
        """Return an index of the same rows."""
        twin = RandomIndex(self.n_kv_heads, self.head_dim, first_row=self.first_row)
        twin._n_rows = self._n_rows
        return twin

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        heads, group = q.shape[:2]
        out[:heads, :group, : stop - start] = self._random.standard_normal((heads, group, stop - start), np.float32)


def register_control() -> None:
    """Make the kind known to stores; may be called any number of times."""
    from kvstore.index.registry import register_index

    register_index(KIND, RandomIndex)
