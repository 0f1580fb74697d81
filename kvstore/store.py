"""The database: schema, sequences, heap, indexes, queries."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvstore.attention import Attended, Attention
from kvstore.budget import Budget, check_budget
from kvstore.config import REDUCTIONS, StoreConfig
from kvstore.errors import (
    ConfigError,
    InvalidQueryError,
    SequenceExistsError,
    SequenceNotFoundError,
    StoreClosedError,
)
from kvstore.explain import Explanation
from kvstore.heap import Heap
from kvstore.index.workspace import Workspace
from kvstore.index_builder import IndexBuilder
from kvstore.maintenance import Maintenance, countdown
from kvstore.mass import measure
from kvstore.planner import Plan, plan_attention
from kvstore.schema import Schema
from kvstore.sequence import Sequence
from kvstore.stats import Counters, StoreStats
from kvstore.topk import Query, TopK, find_top_k, nothing_found
from kvstore.topk_modes import find_mass, find_range
from kvstore.validate import (
    as_group,
    check_beta,
    check_head,
    check_k,
    check_layer,
    check_mass,
    check_query,
    check_scale,
    query_array,
)


class KVStore:
    """Keys and values of many sequences of one model, in memory, with an index over the keys of each table.

    >>> store = KVStore(Schema(n_layers=1, n_q_heads=2, n_kv_heads=1, head_dim=4))
    >>> seq = store.create("book")
    >>> with seq.step():
    ...     seq.append(0, torch.eye(4)[None], torch.eye(4)[None])
    >>> store.topk(0, 0, torch.tensor([0.0, 1.0, 0.5, 0.0]), k=2).positions.tolist()
    [1, 2]
    """

    def __init__(self, schema: Schema, config: StoreConfig | None = None) -> None:
        self.schema = schema
        self.config = config or StoreConfig()
        self.heap = Heap(schema, self.config.arena_bytes, self.config.heap_bytes)
        self.counters = Counters()
        self.workspace = Workspace()
        self.indexing = IndexBuilder(schema, self.config, self.workspace)
        self.codebooks, self.iterations = self.indexing.codebooks, self.indexing.iterations
        self.maintenance = Maintenance()
        self._attention = Attention(schema, self.config, self.workspace)
        self._sequences: dict[str, Sequence] = {}
        self._try_indexes()
        self._generation = 0
        self._closed = False

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Sequence:
        self._check_open()
        try:
            return self._sequences[name]
        except KeyError:
            raise SequenceNotFoundError(f"no sequence is named {name!r}; there are {self._names()}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._sequences

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)

    def create(self, name: str, *, first_row: int = 0) -> Sequence:
        """Make an empty sequence; rows before `first_row` will be padding. Raises `SequenceExistsError`."""
        self._check_open()
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a sequence's name must be a non-empty string, not {name!r}")
        if name in self._sequences:
            raise SequenceExistsError(f"a sequence named {name!r} exists; use store[{name!r}] or drop it first")
        seq = Sequence(self, name, self._generation)
        seq.first_row = first_row
        self._generation += 1
        self._sequences[name] = seq
        return seq

    def drop(self, name: str) -> None:
        """Forget a sequence and give its blocks back; using it afterwards raises `SequenceNotFoundError`."""
        self[name]._drop()
        del self._sequences[name]

    def close(self) -> None:
        """Drop everything and give the memory back; a second call does nothing."""
        if self._closed:
            return
        for seq in self._sequences.values():
            seq._drop()
        self.maintenance.close()
        self._sequences.clear()
        self.heap.close()
        self._closed = True

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all work in the background and take its results.

        Raises `MaintenanceError` for a piece that failed (call again for what is left) and `TimeoutError`.
        """
        self._check_open()
        time_left_s = countdown(timeout_s)
        for seq in self._sequences.values():
            seq._indexes.adopt(seq._tables, seq._positions, len(seq), time_left_s)

    def train_codebooks(self, sequence: Sequence | str | None = None, layer: int | None = None) -> None:
        """Train the model's codebooks (of one layer or all) on a sequence's rows between sinks and window.

        They are in `codebooks` then, as the next version; indexes that exist keep theirs until `reindex`.
        """
        self._find(sequence)._train_codebooks(layer)

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

        What a sequence gets does not depend on the others. `budget` overrides the sequences' own.
        """
        self._check_open()
        check_layer(self.schema, layer)
        if scale is not None:
            check_scale(scale)
        check_query(q, (len(sequences), self.schema.n_q_heads, self.schema.head_dim))
        plans = [self._plan(seq, layer, budget) for seq in sequences]
        if not plans:
            return q.new_empty(0, self.schema.n_q_heads, self.schema.value_dim)
        attended = self._run(layer, sequences, plans, q, scale)
        for plan in plans:
            self.counters.attends[plan.method] += 1
            self.counters.rows_attended += plan.n_attended
            self.counters.rows_available += plan.n_rows - plan.first
        out = torch.from_numpy(attended.out).view(len(plans), self.schema.n_q_heads, self.schema.value_dim)
        return out.to(q.dtype)

    def topk(
        self,
        layer: int,
        head: int,
        q: torch.Tensor,
        k: int | None = None,
        *,
        mass: float | None = None,
        sequence: Sequence | str | None = None,
        rows: str = "all",
        reduce: str | None = None,
        exact: bool = False,
    ) -> TopK:
        """Return the k committed rows with the largest scores, best first; ties go to the lower position.

        q is [head_dim], scored by inner product, or [group, head_dim], the query heads of KV head `head`, scored by
        `reduce` (the config's: the sum over the group of the softmax over the rows asked for). `rows="middle"` leaves
        out sinks and window. `exact=True` passes by the index. k above the number of rows returns them all.
        `mass` in (0, 1] in place of k asks for the fewest rows that hold this share of the softmax mass; their scores
        are their shares, summed over the group. `sequence` may be left out when the store holds just one.
        """
        check_head(self.schema, head)
        group = as_group(self.schema, q)
        every_head = group.expand(self.schema.n_kv_heads, -1, -1)
        if mass is None:
            found = self.topk_heads(layer, every_head, k, sequence=sequence, rows=rows, reduce=reduce, exact=exact)
            return TopK(found.positions[head], found.scores[head], found.exact)
        check_mass(mass, k, reduce)
        seq, query = self._query(layer, every_head, 1, sequence, rows, reduce, exact)
        if query.k == 0:
            return nothing_found()
        return find_mass(seq._tables[layer], seq._indexes[layer], self.config, query, head, mass)

    def topk_heads(
        self,
        layer: int,
        q: torch.Tensor,
        k: int | None,
        *,
        sequence: Sequence | str | None = None,
        rows: str = "all",
        reduce: str | None = None,
        exact: bool = False,
    ) -> TopK:
        """Like `topk` for all KV heads at once: q [n_kv_heads, group, head_dim] -> positions [n_kv_heads, k]."""
        seq, query = self._query(layer, q, check_k(k), sequence, rows, reduce, exact)
        if query.k == 0:
            return nothing_found(self.schema.n_kv_heads)
        return find_top_k(seq._tables[layer], seq._indexes[layer], self.config, query)

    def range(
        self,
        layer: int,
        head: int,
        q: torch.Tensor,
        beta: float,
        *,
        sequence: Sequence | str | None = None,
        rows: str = "all",
        exact: bool = False,
    ) -> TopK:
        """Return all committed rows whose inner product with q [head_dim] is within beta of the largest, best first.

        The query of AlayaDB (arXiv 2504.10326): as many rows as matter, however many those are.
        """
        check_head(self.schema, head)
        check_query(q, (self.schema.head_dim,))
        check_beta(beta)
        every_head = q[None, None].expand(self.schema.n_kv_heads, 1, -1)
        seq, query = self._query(layer, every_head, 1, sequence, rows, None, exact)
        if query.k == 0:
            return nothing_found()
        return find_range(seq._tables[layer], seq._indexes[layer], self.config, query, head, float(beta))

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
        grouped = self._grouped(q[None])[0]
        measured = None
        if analyze and plan.n_rows > plan.first:
            attended = self._run(layer, [seq], [plan], q[None], None)
            measured = measure(seq._tables[layer], plan, attended, grouped, self.schema.scale)
        index = seq._indexes[layer].describe()
        return Explanation(seq.name, layer, self.schema, plan, index, measured)

    def stats(self) -> StoreStats:
        """Return sizes and counters; O(sequences * layers)."""
        self._check_open()
        keepers = [keeper for seq in self._sequences.values() for keeper in seq._indexes]
        indexes = [keeper.index for keeper in keepers if keeper.index is not None]
        return StoreStats(
            sequences=len(self._sequences),
            rows=sum(len(seq) for seq in self._sequences.values()),
            blocks=self.heap.used_blocks,
            heap_used_bytes=self.heap.used_bytes,
            heap_reserved_bytes=self.heap.reserved_bytes,
            index_bytes=sum(index.nbytes for index in indexes),
            index_bytes_per_key=float(np.mean([i.code_bytes_per_key for i in indexes])) if indexes else 0.0,
            indexed_rows=sum(index.n_rows for index in indexes),
            index_builds=sum(keeper.n_builds for keeper in keepers),
            codebook_bytes=self.codebooks.nbytes,
            drift=max((keeper.drift_ratio or 0.0 for keeper in keepers), default=0.0),
            counters=replace(self.counters, attends=dict(self.counters.attends)),
        )

    def _query(
        self,
        layer: int,
        q: torch.Tensor,
        k: int,
        sequence: Sequence | str | None,
        rows: str,
        reduce: str | None,
        exact: bool,
    ) -> tuple[Sequence, Query]:
        """Check a top-k query; its k is cut to the rows there are, so 0 means that there are none."""
        check_layer(self.schema, layer)
        single = isinstance(q, torch.Tensor) and q.ndim == 3 and q.shape[1] == 1
        check_query(q, (self.schema.n_kv_heads, 1 if single else self.schema.group, self.schema.head_dim))
        reduce = self.config.reduce if reduce is None else reduce
        if reduce not in REDUCTIONS:
            raise InvalidQueryError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
        seq = self._find(sequence)
        start, stop = self._row_range(seq, rows)
        k = max(0, min(k, stop - start))
        query = Query(query_array(q, q.shape), k, start, stop, self.schema.scale, reduce, exact)
        self.counters.topks += 1
        return seq, query

    def _run(
        self, layer: int, sequences: SequenceABC[Sequence], plans: list[Plan], q: torch.Tensor, scale: float | None
    ) -> Attended:
        tables = [seq._tables[layer] for seq in sequences]
        indexes = [seq._indexes[layer] for seq in sequences]
        scale = self.schema.scale if scale is None else scale
        return self._attention.run(tables, indexes, plans, self._grouped(q), scale)

    def _grouped(self, q: torch.Tensor) -> npt.NDArray[np.float32]:
        s = self.schema
        return query_array(q, (len(q), s.n_kv_heads, s.group, s.head_dim))

    def _plan(self, seq: Sequence, layer: int, budget: Budget | str) -> Plan:
        self._check_own(seq)
        if budget == "sequence":
            budget = seq.budget
        else:
            check_budget(budget)  # type: ignore[arg-type]
        n_rows = seq._tables[layer].n_rows
        if n_rows <= seq.first_row:
            raise InvalidQueryError(f"sequence {seq.name!r} has no rows in layer {layer} to attend to; append first")
        covered, heads = seq._indexes[layer].covered, self.schema.n_kv_heads
        return plan_attention(self.config, budget, seq.first_row, n_rows, covered, layer, heads)  # type: ignore[arg-type]

    def _row_range(self, seq: Sequence, rows: str) -> tuple[int, int]:
        if rows == "all":
            return seq.first_row, len(seq)
        if rows == "middle":
            return seq.first_row + self.config.sinks, len(seq) - self.config.window
        raise InvalidQueryError(f"rows must be 'all' or 'middle', not {rows!r}")

    def _find(self, sequence: Sequence | str | None) -> Sequence:
        self._check_open()
        if isinstance(sequence, Sequence):
            self._check_own(sequence)
            return sequence
        if isinstance(sequence, str):
            return self[sequence]
        if sequence is not None:
            raise InvalidQueryError(f"a sequence is given by its name or its handle, not by {sequence!r}")
        if len(self._sequences) != 1:
            raise InvalidQueryError(f"say which sequence: the store holds {len(self)} ({self._names()})")
        return next(iter(self._sequences.values()))

    def _try_indexes(self) -> None:
        """Make an empty index of each kind of layer, so that wrong settings show now and not after many rows."""
        if self.config.index.kind != "flat":
            kinds_of_layer = {rope: layer for layer, rope in enumerate(self.schema.rope or (None,))}
            for layer in kinds_of_layer.values():
                self.indexing.empty(layer, 0)

    def _check_own(self, seq: Sequence) -> None:
        if not isinstance(seq, Sequence) or seq._store is not self:
            raise InvalidQueryError(f"{seq!r} is not a sequence of this store; its rows lie elsewhere")
        seq._check_usable()

    def _names(self) -> str:
        names = [repr(name) for name in self._sequences]
        return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "none"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed; open another one")

    def _check(self) -> None:
        """Assert the invariants of everything inside, and that the heap's count equals a recount."""
        self.heap._check()
        held = set()
        for name, seq in self._sequences.items():
            assert seq.name == name
            seq._check()
            held |= {block.key_address for table in seq._tables for block in table._blocks}
        assert len(held) == self.heap.used_blocks
