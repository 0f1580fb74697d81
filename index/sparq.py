"""SparQ: inner products over the channels in which the query is large."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvstore.errors import ConfigError
from kvstore.index.base import FloatArray, IntArray
from kvstore.index.checks import checked_view
from kvstore.index.flat import FlatIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import RowView
from kvstore.index.sparq_kernels import channel_scan
from kvstore.index.threads import run_parallel
from kvstore.index.workspace import Workspace


class SparQIndex(FlatIndex):
    """Scores by `rank` channels of the exact keys (SparQ attention, arXiv 2312.04985); counts rows as `FlatIndex` does.

    For the query heads of a KV head those channels count whose |q|, summed over the group, is largest. A score is the
    sum over them, divided by the root of the share of |q| that they hold: with `scale = head_dim ** -0.5` the softmax
    then has the paper's temperature, sqrt(head_dim * |q_chosen|_1 / |q|_1) (its section 3, step 1), so that fewer
    channels do not flatten it. With every channel chosen scores are exact.

    It keeps nothing: memory O(1), nothing to train, right for rows of any position. What it costs is reading keys,
    `rank` numbers each, 2 * rank bytes for half precision. Numbers of a row lie side by side here, so that whole
    cache lines (64 bytes) come with them; the paper keeps a second copy of the keys by channel to read no more
    than it needs. Scan O(n * rank * group) a KV head.

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

    def _score_ns(self, group: int) -> float:
        return self.rank * (0.5 + 0.1 * group)

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        view = checked_view(view, self.n_kv_heads, self.head_dim, stop)
        channels, weights = chosen_channels(q, self.rank)
        strides = (view.block_tokens, view.head_stride_bytes, view.row_stride_bytes)
        kernel = channel_scan(view.dtype_code)
        run_parallel(kernel, view.block_addresses, *strides, start, stop, channels, weights, out)


def chosen_channels(q: FloatArray, rank: int) -> tuple[IntArray, FloatArray]:
    """Return the channels of each group and what a score weighs them with.

    q: float32 [n_kv_heads, group, head_dim]. channels: int64 [n_kv_heads, rank], ascending, equal ones from the lower
    on. weights: float32 [n_kv_heads, group, rank], the query's numbers over the root of the share of |q| chosen.
    """
    size = np.abs(q.astype(np.float64))
    channels: IntArray = np.sort(np.argsort(-size.sum(axis=1), axis=1, kind="stable")[:, :rank], axis=1)
    where = np.broadcast_to(channels[:, None], (*q.shape[:2], rank))
    total, chosen = size.sum(axis=2), np.take_along_axis(size, where, axis=2).sum(axis=2)
    # A query that is zero in all channels chosen is left at zero.
    stretch = np.sqrt(np.divide(total, chosen, out=np.zeros_like(total), where=chosen > 0))
    return channels, (np.take_along_axis(q, where, axis=2) * stretch[:, :, None]).astype(np.float32)
