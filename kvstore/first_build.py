"""The first index of a table, which may be built beside the forward pass whose rows it covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codebooks import ModelCodebook
from kvstore.config import OVERLAP, StoreConfig
from kvstore.errors import MaintenanceError
from kvstore.index.base import Index
from kvstore.index.runs import Runs
from kvstore.index.weighting import QueryMoments
from kvstore.index_builder import Built, IndexBuilder, Moments
from kvstore.maintenance import Job, Maintenance
from kvstore.reindex import Rebuild
from kvstore.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Premise:
    """What a build takes for granted.

    Attributes:
        start, stop: the rows it covers.
        n_queries: queries that were known, where trainings ask for them.
        codebook: the model's that it codes with; None where it trains its own.
    """

    start: int
    stop: int
    n_queries: int
    codebook: ModelCodebook | None

    def holds(self, now: Premise) -> bool:
        """Whether a build now would take the same for granted."""
        same_rows = (self.start, self.stop) == (now.start, now.stop)
        return same_rows and self.n_queries == now.n_queries and self.codebook is now.codebook


@dataclass(slots=True)
class FirstBuild:
    """Work that was begun when its rows were appended.

    Attributes:
        job: the work. premise: what it took for granted; the commit compares, and has it done again.
        committed: whether its rows have been committed. Before, nobody looks at the result.
    """

    job: Job[Built]
    premise: Premise
    committed: bool = False


class FirstBuilds:
    """How the first index of a table comes about with `build="overlap"`; mixed into `TableIndex`.

    The result is taken when it is needed: by a query of the layer, or before something changes that a table with an
    index would answer in another way (a commit, a truncate, a fork, a last save). So, as long as these wait, a store
    answers as if it had built at the commit. A build that failed is not tried again by itself: the table is scanned
    exactly until `reindex`, or until rows that were to be covered are cut off.
    """

    __slots__ = ("_failed_stop", "_first")

    _first: FirstBuild | None
    _failed_stop: int  # one past the last row of a build that failed

    if TYPE_CHECKING:
        layer: int
        index: Index | None
        _builder: IndexBuilder
        _config: StoreConfig
        _queries: QueryMoments

        @property
        def query_moments(self) -> Moments | None:
            """Of the queries seen."""

        def cancel(self) -> None:
            """Give up work in the background."""

        def _take(self, built: Built) -> None: ...

    @property
    def building(self) -> bool:
        """Whether the table's first index is on its way."""
        return self._first is not None

    def begin(self, table: Table, positions: Callable[[], Runs], first_row: int, maintenance: Maintenance) -> None:
        """Have the first index built by a worker over the rows that are there, committed or not.

        Does nothing where there is one, where it is on its way and nothing has changed since, and where it can only be
        built at the commit. `positions` returns those of all rows.
        """
        start, stop = first_row + self._config.sinks, table.n_rows - self._config.window
        if self.index is not None or not self._is_wanted(start, stop):
            return
        if self._config.index.build != OVERLAP or not self._builder.may_begin(self.layer):
            return
        now = Premise(start, stop, self._queries.count, self._builder.model_codebook(self.layer))
        if self._first is not None and (self._first.committed or self._first.premise.holds(now)):
            return
        self.cancel()
        where = positions().at(np.arange(start, stop))
        work = Rebuild(self._builder, self.layer, table.snapshot(), start, stop, where, False, self.query_moments)
        self._first = FirstBuild(maintenance.submit(work), now)

    def ready(self) -> None:
        """Have the index, if it is on its way and its rows are committed; called where it is needed.

        Waits for it, and raises `MaintenanceError` (once) when it failed, unless the settings say not to.
        """
        if self._first is None or not self._first.committed:
            return
        if self._config.index.wait:
            self._wait()
            self._take_first()
        else:
            self.settle(wait=False)

    def settle(self, *, wait: bool = True) -> None:
        """The same before something changes; a failure is left to be raised by a call that can do so."""
        if self._first is None or not self._first.committed:
            return
        if wait and self._config.index.wait:
            self._wait()
        if self._first.job.done and not self._first.job.failed:
            self._take_first()

    def abort(self) -> None:
        """Give up a build over rows that are taken back."""
        if self._first is not None and not self._first.committed:
            self.cancel()

    def _check(self, n_rows: int) -> None:
        """Assert that what is taken is of committed rows, of which there are n_rows."""
        if self.index is not None:
            self.index._check()
            assert self.index.n_rows == 0 or self.index.stop_row <= n_rows - self._config.window
        if self._first is not None:
            assert self.index is None
            assert not self._first.committed or self._first.premise.stop <= n_rows - self._config.window

    def _is_wanted(self, start: int, stop: int) -> bool:
        """Whether a table with these rows between sinks and window gets a first index by itself."""
        settings = self._config.index
        return settings.kind != "flat" and stop - start >= settings.min_rows and self._failed_stop == 0

    def _wait(self, timeout_s: float | None = None) -> None:
        """Wait until the first index is there or has failed; raises `TimeoutError`."""
        if self._first is not None and not self._first.job.done:
            with self._builder.recorder.span("wait", self.layer):
                self._first.job.wait(timeout_s)

    def _take_first(self) -> None:
        """Take the first index; the rows that came meanwhile wait for a commit, as they do where it is built there."""
        assert self._first is not None
        first, self._first = self._first, None
        try:
            self._take(first.job.result(0))
        except MaintenanceError:
            self._failed_stop = first.premise.stop
            raise
