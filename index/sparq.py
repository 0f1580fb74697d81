"""SparQ: inner products over the channels in which the query is large."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvstore.errors import ConfigError
from kvstore.index.base import FloatArray
from kvstore.index.flat import FlatIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import RowView
from kvstore.index.workspace import Workspace


class SparQIndex(FlatIndex):
    """Scores by `rank` channels of the exact keys (SparQ attention, arXiv 2312.04985); counts rows as `FlatIndex` does.

    For the query heads of a KV head those channels count whose |q|, summed over the group, is largest. A score is the
    sum over them, divided by the root of the share of |q| that they hold: with `scale = head_dim ** -0.5` the softmax
    then has the paper's temperature, sqrt(head_dim * |q_chosen|_1 / |q|_1) (its section 3, step 1), so that fewer
    channels do not flatten it. With every channel chosen scores are exact.

    It keeps nothing: memory O(1), nothing to train, right for rows of any position. It is here to tell what the method
    chooses, not to save reading: `rank` numbers of a key are 2 * rank bytes in half precision, but the numbers of a
    row lie side by side, and 16 channels of 64 touch every cache line of a row. The paper keeps a second copy of
    the keys by channel. So the other channels of the query are set to zero and rows read whole, as by the exact
    scan, which is faster than picking numbers out of them. Scan O(n * group * head_dim) a KV head.

    Args:
        rank: channels looked at; more than head_dim are all of them.
        rope, seed: what a store gives to every kind; neither matters here.

    Raises `ConfigError` for a rank below 1.
    """

    kind: ClassVar[str] = "sparq"
    exact: ClassVar[bool] = False

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        rank: int = 16,
        first_row: int = 0,
        rope: RopeSpec | None = None,
        seed: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        if rank < 1:
            raise ConfigError(f"rank must be at least 1, not {rank}")
        super().__init__(n_kv_heads, head_dim, first_row=first_row, workspace=workspace)
        self.rank = min(rank, head_dim)

    def clone(self) -> SparQIndex:
        """Return an independent index over the same rows."""
        twin = object.__new__(SparQIndex)
        twin.__dict__.update(self.__dict__)
        return twin

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index."""
        return {**super().describe(), "rank": self.rank}

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        super()._scan(narrowed(q, self.rank), view, start, stop, out)


def narrowed(q: FloatArray, rank: int) -> FloatArray:
    """Return the query with zeros in all channels but each group's largest, stretched as `SparQIndex` says.

    q, result: float32 [n_kv_heads, group, head_dim]. Of channels equally large the lower are kept.
    """
    size = np.abs(q.astype(np.float64))
    channels = np.argsort(-size.sum(axis=1), axis=1, kind="stable")[:, :rank]
    kept = np.zeros((q.shape[0], 1, q.shape[2]))
    np.put_along_axis(kept, channels[:, None], 1.0, axis=2)
    total, chosen = size.sum(axis=2), (size * kept).sum(axis=2)
    # A query that is zero in all channels chosen is left at zero.
    stretch = np.sqrt(np.divide(total, chosen, out=np.zeros_like(total), where=chosen > 0))
    return np.ascontiguousarray(q * kept * stretch[:, :, None], np.float32)
