"""A sequence: one request's rows in all layers."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvstore.budget import Budget, check_budget
from kvstore.errors import ConfigError, InvalidQueryError, SequenceNotFoundError, StepError
from kvstore.index.runs import Runs
from kvstore.locking import locked
from kvstore.reads import Reads
from kvstore.recorder import OFF
from kvstore.saved import Saved
from kvstore.spill_reader import Bytes
from kvstore.steps import Steps
from kvstore.table import Table
from kvstore.table_indexes import TableIndexes
from kvstore.tokens import Tokens
from kvstore.validate import (
    check_layer,
    is_integer,
    query_sample,
)

if TYPE_CHECKING:
    from kvstore.store import KVStore


class Sequence(Reads, Steps):
    """Rows of one request. Made by `KVStore.create`; rows enter in steps, all layers or none.

    `keep` says whether a store in a directory saves it. `len(seq)` is the committed length: readers see those rows, and
    since tables are append-only that number is a snapshot. Inside an open step `attend` also sees the rows that its
    layer has just appended.
    """

    def __init__(self, store: KVStore, name: str, generation: int) -> None:
        self.name = name
        self.keep = True
        self.generation = generation
        self._store = store
        self._lock = store._lock
        self._schema = store.schema
        below = store._spill_pool.reader if store._spill_pool is not None else None
        self._tables = [Table(store.schema, store.heap, layer, below) for layer in range(store.schema.n_layers)]
        self._indexes = TableIndexes(store.indexing, store.maintenance)
        self._positions = Runs()
        self._n_rows = 0
        self._next_layer: int | None = None  # what the open step expects; None when no step is open
        self._step_rows = 0
        self._step_positions: npt.NDArray[np.int64] | None = None
        self._step_span = OFF
        self._budget: Budget = store.config.budget
        self._first_row = 0
        self._owner = ""
        self._dropped = False
        self._saved = Saved()
        self._unloaded = False  # its rows are on disk only, until it is used
        self.stays = False  # its blocks must not move now
        self._last_used = 0  # counts uses of all sequences
        self._used_s = time.time()
        self._tokens = Tokens()

    def __len__(self) -> int:
        return self._n_rows

    def __repr__(self) -> str:
        return f"Sequence({self.name!r}, {self._n_rows} rows)"

    @property
    def budget(self) -> Budget:
        """Rows that `attend` reads: a share (float), a number (int) or None for all; the config's until it is set."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        check_budget(budget)
        self._check_usable()
        self._budget = budget

    @property
    def first_row(self) -> int:
        """First row that is not padding; the rows before it are stored but never attended or indexed."""
        return self._first_row

    @first_row.setter
    def first_row(self, row: int) -> None:
        if not is_integer(row) or row < 0 or (self._n_rows and row != self._first_row):
            raise ConfigError(f"first_row is set once, before the first step commits, to 0 or more, not to {row}")
        if row != self._first_row:
            self._first_row = row

    @property
    def owner(self) -> str:
        """Who may find the sequence by its tokens; see `KVStore.create`."""
        return self._owner

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of the first rows, int64 [n], as far as `note_tokens` has said them; see `KVStore.match_prefix`."""
        return self._tokens.ids

    @locked
    def note_tokens(self, ids: npt.ArrayLike | torch.Tensor) -> None:
        """Say which tokens the next rows are whose tokens are not known: int64 [n], committed rows only.

        Raises `InvalidQueryError` when there are not so many rows.
        """
        self._check_usable()
        self._store._check_writable()
        self._tokens.extend(ids, self._n_rows)

    @locked
    def observe_queries(self, layer: int, q: torch.Tensor) -> None:
        """Say what queries of a prompt are like, q [n_q_heads, n, head_dim], before its step commits.

        An index with weighting="queries" is trained for them, on at most 1,024 of a call; others ignore them. Raises
        `SchemaMismatchError` or `NonFiniteError`.
        """
        self._check_usable()
        check_layer(self._schema, layer)
        self._indexes[layer].observe_queries(query_sample(self._schema, q))

    @locked
    def truncate(self, n_rows: int) -> None:
        """Forget the rows from n_rows on, in all layers; raises `InvalidQueryError` if there are fewer.

        Blocks before the cut that lie on the disk only, up to an extent of them, are read: raises what that raises.
        """
        self._check_usable()
        if self.step_open:
            raise StepError("a step is open; commit it or abort it before truncate()")
        if not is_integer(n_rows) or not 0 <= n_rows <= self._n_rows:
            raise InvalidQueryError(f"cannot truncate to {n_rows} rows: the sequence has {self._n_rows}")
        brought = self._read_cut(n_rows)
        self._indexes.truncate(n_rows)
        for table in self._tables:
            table.truncate(n_rows)
        for table, blocks in zip(self._tables, brought, strict=True):
            if blocks:
                table.put_back(blocks)
        self._positions.truncate(n_rows)
        self._saved.truncate(n_rows)
        self._tokens.truncate(n_rows)
        self._n_rows = n_rows

    @locked
    def fork(self, name: str, n_rows: int | None = None, *, keep: bool = True) -> Sequence:
        """Return a new sequence with the same committed rows and indexes; blocks are shared until one is written.

        With n_rows it has the first n_rows of them only; raises `InvalidQueryError` if there are fewer. `keep` as in
        `KVStore.create`.
        """
        self._check_usable()
        if n_rows is not None and (not is_integer(n_rows) or not 0 <= n_rows <= self._n_rows):
            raise InvalidQueryError(f"cannot fork {n_rows} rows: the sequence has {self._n_rows}")
        if self.step_open:
            raise StepError("a step is open; commit it or abort it before fork()")
        twin = self._store.create(name, keep=keep)
        try:
            for layer, table in enumerate(self._tables):
                twin._tables[layer] = table.fork()
            twin._indexes = self._indexes.fork()
            twin._positions, twin._saved = self._positions.clone(), self._saved.fork()
            self._store._forked(twin)
            twin._tokens, twin._owner = self._tokens.clone(), self._owner
            twin._n_rows, twin._first_row, twin._budget = self._n_rows, self._first_row, self._budget
            if n_rows is not None:
                twin.truncate(n_rows)
        except BaseException:
            self._store.drop(name)
            raise
        return twin

    @locked
    def reindex(self, layer: int | None = None, *, background: bool = False) -> None:
        """Train and encode again over all rows between sinks and window, for one layer or all.

        With codebook="model" rows are only encoded again. With `background` the old index serves until a commit, or
        `KVStore.wait`, finds the new one done; `truncate` and `drop` give it up, a failure raises `MaintenanceError`.
        """
        layers = self._between_steps("reindex", layer)
        self._indexes.reindex(self._tables, self._positions, self._first_row, layers, background)

    def _train_codebooks(self, layer: int | None) -> None:
        layers = self._between_steps("train_codebooks", layer)
        self._indexes.calibrate(self._tables, self._positions, self._first_row, layers)

    def _between_steps(self, what: str, layer: int | None) -> SequenceABC[int]:
        """Check that no step is open; return the layers meant."""
        self._check_usable()
        if self.step_open:
            raise StepError(f"a step is open; commit it or abort it before {what}()")
        if layer is None:
            return range(self._schema.n_layers)
        check_layer(self._schema, layer)
        return (layer,)

    def _read_cut(self, n_rows: int) -> list[list[tuple[int, Bytes]]]:
        """Read the blocks that have to come back with a truncate to n_rows, a list a layer, and see that they fit."""
        self.stays = True
        try:
            brought = [table.read_blocks(table.cut_blocks(n_rows)) for table in self._tables]
            self._store.heap.prepare(sum(map(len, brought)) - sum(t.freed_by(n_rows) for t in self._tables))
        finally:
            self.stays = False
        return brought

    def _unload(self) -> None:
        """Give the rows' memory back; they must be on disk."""
        self._indexes.cancel()
        for table in self._tables:
            table.truncate(0)
        self._indexes = self._indexes.emptied()
        self._positions = Runs()
        self._unloaded = True

    def _drop(self) -> None:
        self._indexes.cancel()
        for table in self._tables:
            table.truncate(0)
        self._close_step()
        self._n_rows = 0
        self._dropped = True

    def _check_usable(self) -> None:
        self._store._check_open()
        if self._dropped:
            raise SequenceNotFoundError(f"sequence {self.name!r} has been dropped; create it again")
        self._last_used, self._used_s = self._store._tick(), time.time()
        if self._unloaded:
            self._store._bring_back(self)

    def _check(self) -> None:
        """Assert the invariants: equal lengths, positions for every row, and indexes that stay inside their bounds."""
        for table, keeper in zip(self._tables, self._indexes, strict=True):
            table._check()
            if self._unloaded:
                assert table.n_rows == 0
                assert keeper.index is None
                continue
            assert self.step_open or table.n_rows == self._n_rows
            keeper._check(self._n_rows)
        assert self._positions.n_rows == (0 if self._unloaded else self._n_rows)
