"""Keeps the index of one table in step with its rows."""

from __future__ import annotations

import numpy as np

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.index.base import Index
from kvstore.index.registry import make_index
from kvstore.index.runs import Runs
from kvstore.index.workspace import Workspace
from kvstore.schema import Schema
from kvstore.table import Table


class TableIndex:
    """Builds, extends and shortens the index of one table.

    Covered are the rows between the sinks and the window; what waits for its turn in between is the tail, which every
    query scans exactly. Only committed rows are ever covered.
    """

    __slots__ = ("_config", "_layer", "_schema", "_workspace", "index", "n_builds")

    def __init__(self, schema: Schema, config: StoreConfig, layer: int, workspace: Workspace) -> None:
        self._schema = schema
        self._workspace = workspace  # the store's: one set of scratch buffers serves every index
        self._config = config
        self._layer = layer
        self.index: Index | None = None
        self.n_builds = 0

    @property
    def covered(self) -> tuple[int, int] | None:
        """First and one past the last row that the index holds; None without an index."""
        return (self.index.first_row, self.index.stop_row) if self.index is not None else None

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """The part of the rows [start, stop) that the index holds; (0, 0) without an index."""
        if self.index is None:
            return 0, 0
        return max(start, self.index.first_row), min(stop, self.index.stop_row)

    def advance(self, table: Table, positions: Runs, first_row: int) -> None:
        """Cover the rows that have left the window, once there are enough of them to be worth a call."""
        settings = self._config.index
        start, stop = first_row + self._config.sinks, table.n_rows - self._config.window
        if self.index is None:
            if settings.kind != "flat" and stop - start >= settings.min_rows:
                self.build(table, positions, first_row)
        elif stop - self.index.stop_row >= settings.append_rows:
            self._add(self.index, table, positions, stop)

    def build(self, table: Table, positions: Runs, first_row: int) -> None:
        """Train on all rows between sinks and window and encode them; an index that was there is replaced."""
        start, stop = first_row + self._config.sinks, table.n_rows - self._config.window
        if stop <= start or self._config.index.kind == "flat":
            return
        index = self.new_index(start)
        keys, where = table.read_keys(start, stop), positions.at(np.arange(start, stop))
        index.train(keys, where)
        index.add(keys, where)
        self.index = index  # only now: a build that fails leaves what was there
        self.n_builds += 1

    def new_index(self, first_row: int) -> Index:
        """Return an empty index of the configured kind; raises `ConfigError` when none can be made."""
        settings = self._config.index
        try:
            return make_index(
                settings.kind,
                self._schema.n_kv_heads,
                self._schema.head_dim,
                first_row=first_row,
                rope=self._schema.rope[self._layer] if self._schema.rope else None,
                seed=settings.seed,
                workspace=self._workspace,
                **settings.options,
            )
        except TypeError as error:  # a setting that the kind does not have
            raise ConfigError(f"no index of kind {settings.kind!r} with {settings.options}: {error}") from error

    def truncate(self, n_rows: int) -> None:
        """Uncover what is inside the window of a table cut to n_rows; the codebook stays."""
        if self.index is not None:
            stop = max(self.index.first_row, n_rows - self._config.window)
            if stop < self.index.stop_row:
                self.index.truncate(stop)

    def fork(self) -> TableIndex:
        """Return an independent copy; codebooks are shared."""
        twin = TableIndex(self._schema, self._config, self._layer, self._workspace)
        twin.index = self.index.clone() if self.index is not None else None
        return twin

    def _add(self, index: Index, table: Table, positions: Runs, stop: int) -> None:
        start = index.stop_row
        index.add(table.read_keys(start, stop), positions.at(np.arange(start, stop)))
