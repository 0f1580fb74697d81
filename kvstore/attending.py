"""The attention part of a store's API."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvstore.attention import Attended, Attention
from kvstore.budget import Budget, check_budget
from kvstore.config import StoreConfig
from kvstore.errors import InvalidQueryError
from kvstore.explain import Explanation
from kvstore.index.workspace import Workspace
from kvstore.locking import StoreLock, locked
from kvstore.mass import measure
from kvstore.paged_rows import open_rows
from kvstore.planner import FLAT, Plan, Planner
from kvstore.query import read_query
from kvstore.recorder import Recorder
from kvstore.schema import Schema
from kvstore.stats import Counters
from kvstore.validate import check_layer, check_query, check_scale, query_array

if TYPE_CHECKING:
    from kvstore.persistence import Persistence
    from kvstore.sequence import Sequence
    from kvstore.spill_pool import SpillPool
    from kvstore.topk import AnyRows


class Attending:
    """How `KVStore` attends; mixed into it."""

    _lock: StoreLock
    schema: Schema
    config: StoreConfig
    counters: Counters
    recorder: Recorder
    workspace: Workspace
    _attention: Attention
    _planner: Planner
    _persistence: Persistence | None
    _spill_pool: SpillPool | None

    if TYPE_CHECKING:

        def _check_open(self) -> None: ...

        def _check_own(self, seq: Sequence) -> None: ...

        def _find(self, sequence: Sequence | str | None) -> Sequence: ...

        def _open_table(self, seq: Sequence, layer: int) -> AbstractContextManager[AnyRows]: ...

    @locked
    def attend(
        self,
        layer: int,
        sequences: SequenceABC[Sequence],
        q: torch.Tensor,
        *,
        budget: Budget | str = "sequence",
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attention of one token of each sequence: q [n_sequences, n_q_heads, head_dim] -> [..., value_dim], q's dtype.

        What a sequence gets does not depend on the others. `budget` overrides the sequences' own. Raises
        `MaintenanceError` (once) when an index was waited for and failed; the next call scans its rows exactly.
        """
        return self._attend(layer, sequences, q, budget, scale)[0]

    @locked
    def attend_with_log_norm(
        self,
        layer: int,
        sequences: SequenceABC[Sequence],
        q: torch.Tensor,
        *,
        budget: Budget | str = "sequence",
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `attend`, with the log of the softmax's denominator over the rows read, float32 [..., n_q_heads].

        `kvstore.merging.merge_attention` puts the results over parts of the rows, on several ranks, together by it.
        """
        out, log_norm = self._attend(layer, sequences, q, budget, scale)
        return out, torch.from_numpy(log_norm)

    def _attend(
        self,
        layer: int,
        sequences: SequenceABC[Sequence],
        q: torch.Tensor,
        budget: Budget | str,
        scale: float | None,
    ) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        """Do what `attend_with_log_norm` says.

        Each call of torch or numpy that is saved here saves tens of microseconds a layer: between two layers the model
        reads more weights than the processor's caches hold, and leaves nothing of this code in them.
        """
        self._check_open()
        s = self.schema
        check_layer(s, layer)
        if scale is not None:
            check_scale(scale)
        check_query(q, (len(sequences), s.n_q_heads, s.head_dim))
        if self._persistence is not None:
            self._persistence.residency.use(sequences)
        plans = [self._plan(seq, layer, budget) for seq in sequences]
        if not plans:
            return q.new_empty(0, s.n_q_heads, s.value_dim), np.empty((0, s.n_q_heads), np.float32)
        with self.recorder.span("attend", layer):
            attended = self._run(layer, sequences, plans, q, scale)
        for plan in plans:
            self.counters.attends[plan.method] += 1
            self.counters.rows_attended += plan.n_attended
            self.counters.rows_available += plan.n_rows - plan.first
        out = torch.from_numpy(attended.out.reshape(len(plans), s.n_q_heads, s.value_dim))
        return out if q.dtype == torch.float32 else out.to(q.dtype), attended.log_norm.reshape(len(plans), s.n_q_heads)

    @locked
    def explain(
        self,
        sequence: Sequence | str | None,
        layer: int,
        q: torch.Tensor,
        *,
        analyze: bool = False,
        budget: Budget | str = "sequence",
    ) -> Explanation:
        """Say what `attend` would do for q [n_q_heads, head_dim]; with `analyze=True` do it and measure it."""
        seq = self._find(sequence)
        check_layer(self.schema, layer)
        check_query(q, (self.schema.n_q_heads, self.schema.head_dim))
        plan = self._plan(seq, layer, budget)
        s = self.schema
        grouped = query_array(q, (s.n_kv_heads, s.group, s.head_dim))
        measured = None
        if analyze and plan.n_rows > plan.first:
            attended = self._run(layer, [seq], [plan], q[None], None)
            with self._open_table(seq, layer) as table:
                measured = measure(table, plan, attended, grouped, s.scale)
        index = seq._indexes[layer].describe()
        table = seq._tables[layer]
        return Explanation(seq.name, layer, self.schema, plan, index, measured, table.n_blocks, table.n_spilled)

    def _run(
        self, layer: int, sequences: SequenceABC[Sequence], plans: list[Plan], q: torch.Tensor, scale: float | None
    ) -> Attended:
        tables = [seq._tables[layer] for seq in sequences]
        indexes = [seq._indexes[layer] for seq in sequences]
        scale = self.schema.scale if scale is None else scale
        with open_rows(tables, self._spill_pool) as rows:
            plain, scaled = read_query(q, self.schema, scale, self.workspace)
            return self._attention.run(rows, indexes, plans, plain, scaled, scale)

    def _plan(self, seq: Sequence, layer: int, budget: Budget | str) -> Plan:
        self._check_own(seq)
        if budget == "sequence":
            budget = seq.budget
        else:
            check_budget(budget)  # type: ignore[arg-type]
        n_rows = seq._tables[layer].n_rows
        if n_rows <= seq.first_row:
            raise InvalidQueryError(f"sequence {seq.name!r} has no rows in layer {layer} to attend to; append first")
        keeper, rows = seq._indexes[layer], (seq.first_row, n_rows)
        found = self._planner.plan(budget, *rows, keeper.covered, layer, building=keeper.building)  # type: ignore[arg-type]
        if found.method == FLAT and keeper.building:
            keeper.ready()  # only now: a dense plan needs no index
            found = self._planner.plan(budget, *rows, keeper.covered, layer, building=keeper.building)  # type: ignore[arg-type]
        return found
