"""The part of a sequence's API that appends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import StepError
from kvstore.index.runs import Runs
from kvstore.locking import StoreLock, locked
from kvstore.new_rows import NewRows
from kvstore.recorder import Span
from kvstore.schema import Schema
from kvstore.table import Table
from kvstore.table_indexes import TableIndexes
from kvstore.validate import check_layer, check_positions

if TYPE_CHECKING:
    from kvstore.sequence import Sequence
    from kvstore.store import KVStore


class Steps:
    """How rows enter a `Sequence`: in steps, all layers or none; mixed into it."""

    name: str
    _lock: StoreLock
    _store: KVStore
    _schema: Schema
    _tables: list[Table]
    _indexes: TableIndexes
    _positions: Runs
    _n_rows: int
    _first_row: int
    _next_layer: int | None
    _step_rows: int
    _step_positions: npt.NDArray[np.int64] | None
    _step_span: Span

    if TYPE_CHECKING:

        def _check_usable(self) -> None: ...

    @property
    def step_open(self) -> bool:
        """Whether a step has begun and neither committed nor been rolled back."""
        return self._next_layer is not None

    @contextmanager
    def step(self) -> Iterator[Sequence]:
        """One forward pass: every layer appends, then all commit; an exception takes every layer back."""
        self.begin_step()
        try:
            yield cast("Sequence", self)
        except BaseException:
            self.abort_step()
            raise
        self.commit_step()

    @locked
    def begin_step(self) -> None:
        """Open a step; raises `StepError` when one is open, `MaintenanceError` (once) for an index that failed."""
        self._check_usable()
        self._store._check_writable()
        if self._next_layer is not None:
            raise StepError(f"a step of {self.name!r} is open already; commit it or abort it first")
        self._indexes.raise_failure()
        self._step_span = self._store.recorder.span("step", lane=self.name)
        self._next_layer = 0

    @locked
    def append(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: npt.ArrayLike | torch.Tensor | None = None,
    ) -> None:
        """Append rows to one layer inside a step; layers come in order 0, 1, 2, ..., all with as many rows.

        keys [n_kv_heads, n, head_dim] as attention uses them (after RoPE) and values [n_kv_heads, n, value_dim], schema
        dtype, any strides, on CPU; they are copied. `positions` int64 [n] are the RoPE positions where they do not
        go on from the row before; they are taken from layer 0. Raises `SchemaMismatchError`, `NonFiniteError`,
        `StepError`, `LayerNotFoundError` or `HeapFullError`, and the step stays as it was.
        """
        self._check_append(layer)
        self._append(layer, NewRows(self._schema, keys, values), 0, positions)

    def _check_append(self, layer: int) -> None:
        """Raise unless the layer is due."""
        self._check_usable()
        check_layer(self._schema, layer)
        if layer != self._next_layer:
            raise StepError(self._out_of_order(layer))

    def _append(
        self, layer: int, rows: NewRows, place: int, positions: npt.ArrayLike | torch.Tensor | None = None
    ) -> None:
        """Append the rows at `place` of a batch."""
        if layer == 0:
            self._step_positions = check_positions(positions, rows.n)
            self._step_rows = rows.n
        elif rows.n != self._step_rows:
            raise StepError(
                f"layer {layer} brought {rows.n} rows, layer 0 of this step {self._step_rows}; bring as many"
            )
        with self._store.recorder.span("append", layer):
            self._tables[layer].append(rows, place)
        self._next_layer = layer + 1
        self._indexes.begin(layer, self._tables, self._positions_with_step, self._first_row)

    @locked
    def commit_step(self) -> None:
        """Make the step's rows visible in all layers at once; with a layer missing, roll back and raise `StepError`."""
        self._check_usable()
        if self._next_layer is None:
            raise StepError("no step is open; call begin_step() or use `with seq.step():`")
        missing = self._schema.n_layers - self._next_layer
        if 0 < missing < self._schema.n_layers:
            at = self._next_layer
            self.abort_step()
            raise StepError(f"the step ended before layer {at}: {missing} layers brought no rows; it was rolled back")
        if missing == 0:
            self._positions.append(self._new_positions())
            self._n_rows += self._step_rows
            self._store.counters.steps += 1
        self._close_step()
        if missing == 0:
            with self._store.recorder.span("commit"):
                self._indexes.advance(self._tables, self._positions, self._first_row)
                self._store._committed(cast("Sequence", self))

    @locked
    def abort_step(self) -> None:
        """Take back what the open step has appended; does nothing when none is open."""
        if self._next_layer is None:
            return
        self._store.counters.aborted_steps += 1
        self._indexes.abort()
        for table in self._tables:
            table.truncate(self._n_rows)
        self._close_step()

    def _positions_with_step(self) -> Runs:
        """RoPE positions of all rows, those of the open step included."""
        positions = self._positions.clone()
        positions.append(self._new_positions())
        return positions

    def _new_positions(self) -> npt.NDArray[np.int64]:
        """RoPE positions of the open step's rows; by default they go on from the last row, the first token being 0."""
        if self._step_positions is not None:
            return self._step_positions
        start = -self._first_row
        if self._n_rows:
            start = int(self._positions.at(np.array([self._n_rows - 1]))[0]) + 1
        return np.arange(start, start + self._step_rows)

    def _close_step(self) -> None:
        self._next_layer, self._step_rows, self._step_positions = None, 0, None
        self._step_span.end()

    def _out_of_order(self, layer: int) -> str:
        if self._next_layer is None:
            return "append needs an open step; use `with seq.step():`"
        if self._next_layer == self._schema.n_layers:
            return f"all {self._schema.n_layers} layers of this step have appended; commit it before layer {layer}"
        return f"layer {layer} came where layer {self._next_layer} was due; layers append in order, once a step"
