"""The database: schema, sequences, heap, indexes, queries."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy.typing as npt
import torch

from kvstore.attending import Attending
from kvstore.attention import Attention
from kvstore.config import StoreConfig
from kvstore.durable import Durable
from kvstore.errors import (
    ConfigError,
    InvalidQueryError,
    SequenceExistsError,
    SequenceNotFoundError,
    StoreClosedError,
)
from kvstore.heap import Heap
from kvstore.index.workspace import Workspace
from kvstore.index_builder import IndexBuilder
from kvstore.locking import StoreLock, locked
from kvstore.maintenance import Maintenance, countdown
from kvstore.new_rows import NewRows
from kvstore.planner import Planner
from kvstore.prefixes import Match, Prefixes
from kvstore.queries import Queries
from kvstore.schema import Schema
from kvstore.sequence import Sequence
from kvstore.stats import Counters, StoreStats, collect
from kvstore.tokens import Tokens

if TYPE_CHECKING:
    from kvstore.persistence import Persistence
    from kvstore.spill_pool import SpillPool
    from kvstore.timeline import Timeline


class KVStore(Queries, Attending, Durable):
    """Keys and values of many sequences of one model, with an index over the keys of each table.

    `KVStore(schema)` lives in memory; `KVStore.open(path, schema)` keeps its sequences in a directory too.

    >>> store = KVStore(Schema(n_layers=1, n_q_heads=2, n_kv_heads=1, head_dim=4))
    >>> seq = store.create("book")
    >>> with seq.step():
    ...     seq.append(0, torch.eye(4)[None], torch.eye(4)[None])
    >>> store.topk(0, 0, torch.tensor([0.0, 1.0, 0.5, 0.0]), k=2).positions.tolist()
    [1, 2]
    """

    def __init__(self, schema: Schema, config: StoreConfig | None = None) -> None:
        self._lock = StoreLock()
        self.schema = schema
        self.config = config or StoreConfig()
        heap_bytes, huge_pages = self.config.heap_bytes, self.config.huge_pages
        self.heap = Heap(schema, self.config.arena_bytes, heap_bytes, huge_pages=huge_pages)
        self.counters = Counters()
        self.workspace = Workspace()
        self.indexing = IndexBuilder(schema, self.config, self.workspace)
        self.codebooks, self.iterations = self.indexing.codebooks, self.indexing.iterations
        self.recorder = self.indexing.recorder
        self.maintenance = Maintenance(self.config.index.threads)
        self._attention = Attention(schema, self.config, self.workspace, self.recorder)
        self._planner = Planner(self.config, schema.n_kv_heads)
        self._sequences: dict[str, Sequence] = {}
        self._try_indexes()
        self._generation = self._clock = 0
        self._prefixes = Prefixes(schema.fingerprint, schema.block_tokens)
        self._persistence: Persistence | None = None
        self._spill_pool: SpillPool | None = None
        self._closed = False

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @locked
    def __getitem__(self, name: str) -> Sequence:
        self._check_open()
        found = self._sequences.get(name)
        if found is not None:
            return found
        if name not in self:
            raise SequenceNotFoundError(f"no sequence is named {name!r}; there are {self._names()}")
        assert self._persistence is not None
        self._sequences[name] = self._persistence.load(name)
        return self._sequences[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sequences or name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(dict.fromkeys([*self._stored, *self._sequences])))

    def __len__(self) -> int:
        return len({*self._sequences, *self._stored})

    @property
    def _stored(self) -> list[str]:
        """Names of the sequences on disk; there are none once the store is closed."""
        return self._persistence.names if self._persistence is not None and not self._closed else []

    @locked
    def create(self, name: str, *, first_row: int = 0, owner: str = "", keep: bool = True) -> Sequence:
        """Make an empty sequence; rows before `first_row` will be padding. Raises `SequenceExistsError`.

        Only `match_prefix` of the same `owner` will find it by its tokens. Without `keep` it never goes to the disk.
        """
        self._check_writable()
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a sequence's name must be a non-empty string, not {name!r}")
        if name in self:
            raise SequenceExistsError(f"a sequence named {name!r} exists; use store[{name!r}] or drop it first")
        seq = Sequence(self, name, self._generation)
        seq.first_row, seq._owner, seq.keep = first_row, owner, keep
        self._generation += 1
        self._sequences[name] = seq
        if self._persistence is not None:
            self._persistence.residency.register(seq)
        return seq

    @locked
    def drop(self, name: str) -> None:
        """Forget a sequence and give its blocks back; using it afterwards raises `SequenceNotFoundError`."""
        self._check_writable()
        if name not in self:
            raise SequenceNotFoundError(f"no sequence is named {name!r}; there are {self._names()}")
        seq = self._sequences.get(name)
        if self._persistence is not None:
            seq = self._persistence.residency.handle(name) or seq
            self._persistence.drop(name, seq)
        self._prefixes.remove(name)
        self._sequences.pop(name, None)
        if seq is not None:
            seq._drop()

    @locked
    def append(
        self,
        layer: int,
        sequences: SequenceABC[Sequence],
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: SequenceABC[npt.ArrayLike | torch.Tensor] | None = None,
    ) -> None:
        """`Sequence.append` for a batch: keys [n_sequences, n_kv_heads, n, head_dim], values [..., value_dim].

        `positions`: int64 [n] of each sequence. Raises what that raises. All rows are looked at before any is taken;
        when the heap is full, the sequences before the one that found no room have theirs: abort their steps.
        """
        self._check_open()
        for seq in sequences:
            self._check_own(seq)
            seq._check_append(layer)
        rows = NewRows(self.schema, keys, values, len(sequences))
        for place, seq in enumerate(sequences):
            seq._append(layer, rows, place, positions[place] if positions is not None else None)

    @locked
    def match_prefix(self, tokens: npt.ArrayLike | torch.Tensor, *, owner: str = "") -> Match | None:
        """Return the sequence of this owner that begins with the most of these tokens, int64 [n]; at least a block.

        `store[match.name].fork(name, match.n_rows)` goes on from there. None where there is none. O(n), and O(rows)
        once for sequences whose tokens have changed. Sequences with padding are not found.
        """
        self._check_open()
        wanted = Tokens()
        wanted.extend(tokens, 1 << 62)
        for name in self:
            seq = self._sequences.get(name)
            if seq is not None:
                self._prefixes.update(name, seq._tokens, seq.owner if seq.first_row == 0 else None)
            elif name not in self._prefixes and self._persistence is not None:
                self._prefixes.update(name, *self._persistence.tokens_of(name))
        return self._prefixes.find(wanted.ids, owner)

    def close(self) -> None:
        """Save what lies in a directory, then give all memory back; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._close()

    def _close(self) -> None:
        try:
            if self._persistence is not None:
                self._persistence.close(self._sequences.values())
        finally:
            for seq in self._sequences.values():
                seq._drop()
            self.maintenance.close()
            self._sequences.clear()
            self.heap.close()
            self._closed = True

    def timeline(self) -> AbstractContextManager[Timeline]:
        """Record what the store does, and when, while the context is open; see `Timeline`.

        `with store.timeline() as timeline: ...`, then `timeline.save("trace.json")`. Raises `ConfigError` when one is
        being recorded already.
        """
        return self.recorder.record()

    @locked
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all work in the background over committed rows and take its results.

        Raises `MaintenanceError` for a piece that failed (call again for what is left) and `TimeoutError`.
        """
        self._check_open()
        time_left_s = countdown(timeout_s)
        for seq in self._sequences.values():
            seq._indexes.adopt(seq._tables, seq._positions, len(seq), time_left_s)

    @locked
    def train_codebooks(self, sequence: Sequence | str | None = None, layer: int | None = None) -> None:
        """Train the model's codebooks (of one layer or all) on a sequence's rows between sinks and window.

        They are in `codebooks` then, as the next version; indexes that exist keep theirs until `reindex`.
        """
        self._find(sequence)._train_codebooks(layer)

    @locked
    def stats(self) -> StoreStats:
        """Return sizes and counters; O(sequences * layers)."""
        self._check_open()
        return collect(self)

    def _find(self, sequence: Sequence | str | None) -> Sequence:
        self._check_open()
        if isinstance(sequence, Sequence):
            self._check_own(sequence)
            return sequence
        if isinstance(sequence, str):
            return self[sequence]
        if sequence is not None:
            raise InvalidQueryError(f"a sequence is given by its name or its handle, not by {sequence!r}")
        if len(self) != 1:
            raise InvalidQueryError(f"say which sequence: the store holds {len(self)} ({self._names()})")
        return self[next(iter(self))]

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

    def _tick(self) -> int:
        """Count uses of sequences."""
        self._clock += 1
        return self._clock

    def _names(self) -> str:
        names = [repr(name) for name in self]
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
            held |= {block.key_address for table in seq._tables for block in table.heap_blocks()}
        assert len(held) == self.heap.used_blocks
