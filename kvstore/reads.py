"""The part of a sequence's API that reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch

from kvstore.budget import Budget
from kvstore.errors import InvalidQueryError
from kvstore.index.runs import Runs
from kvstore.locking import StoreLock, locked
from kvstore.schema import Schema
from kvstore.table import Table
from kvstore.topk import TopK
from kvstore.validate import check_head, check_layer, check_row_ids

if TYPE_CHECKING:
    from kvstore.explain import Explanation
    from kvstore.sequence import Sequence
    from kvstore.store import KVStore


class Reads:
    """What a `Sequence` answers about its rows; mixed into it, and changes nothing."""

    _lock: StoreLock
    _store: KVStore
    _schema: Schema
    _tables: list[Table]
    _positions: Runs
    _n_rows: int
    _unloaded: bool

    if TYPE_CHECKING:

        def _check_usable(self) -> None: ...

    @property
    def _itself(self) -> Sequence:
        return cast("Sequence", self)

    @locked
    def n_rows(self, layer: int) -> int:
        """Rows of one layer, those of the open step included."""
        check_layer(self._schema, layer)
        return self._n_rows if self._unloaded else self._tables[layer].n_rows

    def attend(
        self, layer: int, q: torch.Tensor, *, budget: Budget | str = "sequence", scale: float | None = None
    ) -> torch.Tensor:
        """Attention of one token's queries over this layer's rows: plan, search, rerank, fetch, softmax.

        q [n_q_heads, head_dim] -> [n_q_heads, value_dim] in q's dtype. `budget` overrides the sequence's, `scale` the
        schema's. Query heads h * group .. (h + 1) * group - 1 belong to KV head h.
        """
        batch = q[None] if isinstance(q, torch.Tensor) else q
        return self._store.attend(layer, [self._itself], batch, budget=budget, scale=scale)[0]

    def attend_with_log_norm(
        self, layer: int, q: torch.Tensor, *, budget: Budget | str = "sequence", scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `attend`, with the log of the softmax's denominator, float32 [n_q_heads]; see `merge_attention`."""
        batch = q[None] if isinstance(q, torch.Tensor) else q
        found = self._store.attend_with_log_norm(layer, [self._itself], batch, budget=budget, scale=scale)
        return found[0][0], found[1][0]

    def topk(self, layer: int, head: int, q: torch.Tensor, k: int, **options: Any) -> TopK:
        """Like `KVStore.topk`, for this sequence."""
        return self._store.topk(layer, head, q, k, sequence=self._itself, **options)

    @locked
    def fetch(
        self, layer: int, head: int, positions: npt.ArrayLike | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows of one KV head, in the order asked for: keys [n, head_dim], values [n, value_dim], bit for bit."""
        self._check_usable()
        check_layer(self._schema, layer)
        check_head(self._schema, head)
        return self._tables[layer].gather(head, check_row_ids(positions, self._n_rows))

    @locked
    def read(self, layer: int, start: int = 0, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a range of rows, those of the open step included: [n_kv_heads, stop - start, dim] each."""
        self._check_usable()
        check_layer(self._schema, layer)
        n = self._tables[layer].n_rows
        stop = n if stop is None else stop
        if not 0 <= start <= stop <= n:
            raise InvalidQueryError(f"rows [{start}, {stop}) are not within the {n} rows of layer {layer}")
        return self._tables[layer].read(start, stop)

    @locked
    def positions(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Return the RoPE positions of the committed rows [start, stop), int64 [stop - start]."""
        self._check_usable()
        stop = self._n_rows if stop is None else stop
        if not 0 <= start <= stop <= self._n_rows:
            raise InvalidQueryError(f"rows [{start}, {stop}) are not within the {self._n_rows} committed rows")
        return self._positions.at(np.arange(start, stop))

    def explain(
        self, layer: int, q: torch.Tensor, *, analyze: bool = False, budget: Budget | str = "sequence"
    ) -> Explanation:
        """Say what `attend` would do; with `analyze=True` do it, time it and measure the attention mass caught."""
        return self._store.explain(self._itself, layer, q, analyze=analyze, budget=budget)
