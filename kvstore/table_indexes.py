"""The indexes of one sequence, one a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvstore.config import OVERLAP, IndexConfig
from kvstore.errors import InvalidQueryError
from kvstore.index.runs import Runs
from kvstore.index_builder import IndexBuilder
from kvstore.maintenance import Maintenance
from kvstore.table import Table
from kvstore.table_index import TableIndex


class TableIndexes:
    """Hands each layer's table to its `TableIndex`; `layers` are layer numbers."""

    __slots__ = ("_builder", "_keepers", "_maintenance")

    def __init__(self, builder: IndexBuilder, maintenance: Maintenance) -> None:
        self._builder = builder
        self._maintenance = maintenance
        self._keepers = [TableIndex(builder, layer) for layer in range(builder.schema.n_layers)]

    def __getitem__(self, layer: int) -> TableIndex:
        return self._keepers[layer]

    def __iter__(self) -> Iterator[TableIndex]:
        return iter(self._keepers)

    def __len__(self) -> int:
        return len(self._keepers)

    def advance(self, tables: Sequence[Table], positions: Runs, first_row: int) -> None:
        """Cover the committed rows that have left the window, in all layers."""
        for table, keeper in zip(tables, self._keepers, strict=True):
            keeper.advance(table, positions, first_row, self._maintenance)

    def begin(self, layer: int, tables: Sequence[Table], positions: Callable[[], Runs], first_row: int) -> None:
        """Begin what first indexes can be built now that a layer has its rows, if the settings say so.

        The layer before is looked at again: a model says only after `append` what its queries and its padding are.
        `positions` returns those of all rows, the open step's included.
        """
        if self._settings.build != OVERLAP:
            return
        last = layer if self._builder.wants_queries else layer + 1
        for at in range(max(0, layer - 1), last):
            self._keepers[at].begin(tables[at], positions, first_row, self._maintenance)

    def settle(self) -> None:
        """Take first indexes that were begun, after waiting for them if the settings say so; raises no failure."""
        for keeper in self._keepers:
            keeper.settle()

    def abort(self) -> None:
        """Give up builds over rows that are taken back."""
        for keeper in self._keepers:
            keeper.abort()

    def reindex(
        self, tables: Sequence[Table], positions: Runs, first_row: int, layers: Iterable[int], background: bool
    ) -> None:
        """Build anew over all rows between sinks and window, at once or in the background."""
        own = self._settings.codebook != "model"
        for layer in layers:
            keeper = self._keepers[layer]
            if background:
                keeper.rebuild_later(tables[layer], positions, first_row, self._maintenance)
            else:
                keeper.build(tables[layer], positions, first_row, own=own)

    def calibrate(self, tables: Sequence[Table], positions: Runs, first_row: int, layers: Iterable[int]) -> None:
        """Train the model's codebooks on the rows between sinks and window; raises `InvalidQueryError` without any."""
        config = self._builder.config
        for layer in layers:
            start, stop = first_row + config.sinks, tables[layer].n_rows - config.window
            if stop <= start:
                raise InvalidQueryError("there are no rows between sinks and window to train codebooks on")
            keys, where = tables[layer].read_keys(start, stop), positions.at(np.arange(start, stop))
            self._builder.calibrate(layer, start, keys, where, self._keepers[layer].query_moments)

    def adopt(
        self,
        tables: Sequence[Table],
        positions: Runs,
        n_rows: int,
        time_left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Wait for work in the background and take its results; n_rows are the rows committed."""
        for table, keeper in zip(tables, self._keepers, strict=True):
            if keeper.rebuilding:
                keeper.adopt(table, positions, n_rows, time_left_s())

    def raise_failure(self) -> None:
        """Raise `MaintenanceError` if work in the background has failed; each failure is raised once."""
        for keeper in self._keepers:
            keeper.raise_failure()

    def cancel(self) -> None:
        """Give up all work in the background."""
        for keeper in self._keepers:
            keeper.cancel()

    def truncate(self, n_rows: int) -> None:
        """Uncover what is inside the window of tables cut to n_rows."""
        for keeper in self._keepers:
            keeper.truncate(n_rows)

    def fork(self) -> TableIndexes:
        """Return independent copies; codebooks are shared."""
        twin = TableIndexes(self._builder, self._maintenance)
        twin._keepers = [keeper.fork() for keeper in self._keepers]
        return twin

    def emptied(self) -> TableIndexes:
        """Return the same without indexes; what is known of the queries stays."""
        twin = TableIndexes(self._builder, self._maintenance)
        for keeper, former in zip(twin, self, strict=True):
            keeper.take_queries(former)
        return twin

    @property
    def _settings(self) -> IndexConfig:
        return self._builder.config.index
