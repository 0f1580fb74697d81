"""Keeps the index of one table in step with its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codebooks import has_codebook
from kvstore.config import EXTEND, REINDEX
from kvstore.drift import Drift
from kvstore.errors import MaintenanceError
from kvstore.first_build import FirstBuild, FirstBuilds
from kvstore.index.base import Index
from kvstore.index.runs import Runs
from kvstore.index.segments import SegmentedIndex
from kvstore.index.weighting import QueryMoments
from kvstore.index_builder import Built, IndexBuilder, Moments, observe
from kvstore.maintenance import Job, Maintenance
from kvstore.reindex import Rebuild
from kvstore.table import Table

REFINE_DRIFT = 2.0
"""Drift above which codebook="auto" trains the sequence's own, where no `reindex_drift` is set.

On real keys another topic alone gives up to 1.7 while the recall after the rerank stays; rotated keys that the codebook
does not know give 1.6 to 6, and recall falls.
"""

GROWTH = 8
"""A table is trained again by itself only after it has grown by an eighth: a text that no codebook fits would else
train for ever."""


class TableIndex(FirstBuilds):
    """Builds, extends and shortens the index of one table.

    Covered are the rows between the sinks and the window; what waits for its turn in between is the tail, which every
    query scans exactly. Only committed rows are ever covered. Work in the background only computes: the index changes
    when the thread that owns the sequence takes the result.
    """

    __slots__ = ("_builder", "_config", "_job", "_job_stop", "_notes", "_queries",
                 "_trained_rows", "drift", "index", "layer", "n_builds")  # fmt: skip

    def __init__(self, builder: IndexBuilder, layer: int) -> None:
        self._builder = builder
        self._config = builder.config
        self.layer = layer
        self._job: Job[Built] | None = None
        self._job_stop = 0  # one past the last row that the job reads
        self._first: FirstBuild | None = None
        self._failed_stop = 0
        self._trained_rows = 0
        self._notes: dict[str, Any] = {}
        self._queries = QueryMoments()
        self.drift: Drift | None = None
        self.index: Index | None = None
        self.n_builds = 0

    @property
    def covered(self) -> tuple[int, int] | None:
        """First and one past the last row that the index holds; None without an index."""
        return (self.index.first_row, self.index.stop_row) if self.index is not None else None

    @property
    def rebuilding(self) -> bool:
        """Whether work in the background waits, runs or has a result to take."""
        return self._job is not None or self._first is not None

    @property
    def working(self) -> bool:
        """Whether work in the background waits or runs."""
        jobs = (self._job, self._first.job if self._first is not None else None)
        return any(job is not None and not job.done for job in jobs)

    @property
    def drift_ratio(self) -> float | None:
        """Error of recent rows relative to training (1.0: the same); None when it is not known, or means nothing."""
        return self.drift.ratio if self.drift is not None else None

    @property
    def query_moments(self) -> Moments | None:
        """E[q q'] of the queries seen, float64 [n_kv_heads, head_dim, head_dim]; None when none were wanted or seen."""
        return self._queries.mean

    def observe_queries(self, q: npt.NDArray[np.float32]) -> None:
        """Learn what queries are like, float32 [n_kv_heads, n, head_dim], where trainings ask for it."""
        if self._builder.wants_queries:
            self._queries.add(q)

    @property
    def trained_rows(self) -> int:
        """Rows that the codebook was trained on, 0 when it is the model's."""
        return self._trained_rows

    def take_queries(self, other: TableIndex) -> None:
        """Know of the queries what another one knows."""
        self._queries = other._queries.clone()

    def restore(self, built: Built) -> None:
        """Take an index that was stored."""
        self._take(built)

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """The part of the rows [start, stop) that the index holds; (0, 0) without an index."""
        if self.index is None:
            return 0, 0
        return max(start, self.index.first_row), min(stop, self.index.stop_row)

    def advance(self, table: Table, positions: Runs, first_row: int, maintenance: Maintenance) -> None:
        """Cover the rows that have left the window, once there are enough of them to be worth a call."""
        self.settle()
        if self._job is not None and self._job.done and not self._job.failed:
            self.adopt(table, positions, table.n_rows)
        settings = self._config.index
        start, stop = first_row + self._config.sinks, table.n_rows - self._config.window
        if self.index is None:
            if not self._is_wanted(start, stop) or (self._first is not None and self._first.committed):
                return
            self.begin(table, lambda: positions, first_row, maintenance)
            if self._first is not None:
                self._first.committed = True
                self.settle(wait=False)
                return
            self.build(table, positions, first_row)
        elif stop - self.index.stop_row >= settings.append_rows:
            if self.drift is not None and self._builder.may_donate(self.layer, stop - start):
                self.build(table, positions, first_row)  # long enough by now for the codebook that all will share
            elif settings.turns != EXTEND and self._is_turn(self.index, stop):
                self._take_turn(self.index, table, positions, first_row, stop)
            else:
                self._add(self.index, table, positions, stop)
        else:
            return
        if self._job is None and self._should_train():
            self.rebuild_later(table, positions, first_row, maintenance)

    def build(self, table: Table, positions: Runs, first_row: int, *, own: bool = False) -> None:
        """Cover all rows between sinks and window anew; an index that was there is replaced.

        With `own` the codebook is trained on these rows, else it is the one that the settings ask for.
        """
        start, stop = first_row + self._config.sinks, table.n_rows - self._config.window
        if stop <= start or self._config.index.kind == "flat":
            return
        keys, where = table.read_keys(start, stop), positions.at(np.arange(start, stop))
        if own:
            settings = self._builder.iterations_for(stop - start)
            with self._builder.recorder.span("build", self.layer):
                built = self._builder.train(self.layer, start, keys, where, settings, self.query_moments)
        else:
            with self._builder.recorder.span("build", self.layer):
                built = self._builder.build(self.layer, start, keys, where, self.query_moments)
        self.cancel()
        self._take(built)  # only now: a build that fails leaves what was there

    def rebuild_later(self, table: Table, positions: Runs, first_row: int, maintenance: Maintenance) -> None:
        """Queue a build over the rows that are there now; work that was queued before is given up."""
        start, stop = first_row + self._config.sinks, table.n_rows - self._config.window
        if stop <= start or self._config.index.kind == "flat":
            return
        self.settle()
        self.cancel()
        own = self._config.index.codebook != "model"
        where = positions.at(np.arange(start, stop))
        work = Rebuild(self._builder, self.layer, table.snapshot(), start, stop, where, own, self.query_moments)
        self._job, self._job_stop = maintenance.submit(work), stop

    def adopt(self, table: Table, positions: Runs, n_rows: int, timeout_s: float | None = None) -> None:
        """Take the result of the background, after waiting for it, and add the rows that came meanwhile.

        Raises `MaintenanceError` when the work failed (once; the index is as it was) and `TimeoutError`.
        """
        if self._first is not None and self._first.committed:
            self._wait(timeout_s)
            self._take_first()
        job = self._job
        if job is None:
            return
        try:
            built = job.result(timeout_s)
        except MaintenanceError:
            self._give_up()
            raise
        self._job = None
        self._add_to(built.index, built.drift, table, positions, n_rows - self._config.window)
        self._take(built)

    def raise_failure(self) -> None:
        """Raise `MaintenanceError` if work in the background has failed; does not wait."""
        if self._first is not None and self._first.committed and self._first.job.failed:
            self._take_first()
        if self._job is not None and self._job.failed:
            job = self._job
            self._give_up()
            job.result()

    def cancel(self) -> None:
        """Give up work in the background; its result will be dropped."""
        if self._job is not None:
            self._job.cancel()
            self._job = None
        if self._first is not None:
            self._first.job.cancel()
            self._first = None

    def truncate(self, n_rows: int) -> None:
        """Uncover what is inside the window of a table cut to n_rows; the codebook stays."""
        stop = n_rows - self._config.window
        self.settle()
        if stop < self._failed_stop:
            self._failed_stop = 0
        if stop < (self._first.premise.stop if self._first is not None else self._job_stop):
            self.cancel()  # it reads, or will have covered, rows that are no more
        if self.index is not None:
            stop = max(self.index.first_row, stop)
            if stop < self.index.stop_row:
                self.index.truncate(stop)

    def fork(self) -> TableIndex:
        """Return an independent copy; codebooks are shared, work in the background is not.

        The first index is, since it is waited for; where the settings say not to wait, the twin builds its own.
        """
        self.settle()
        twin = TableIndex(self._builder, self.layer)
        twin.index = self.index.clone() if self.index is not None else None
        twin.drift = self.drift.clone() if self.drift is not None else None
        twin._failed_stop = self._failed_stop
        twin._trained_rows, twin._notes, twin._queries = self._trained_rows, self._notes, self._queries.clone()
        return twin

    def describe(self) -> dict[str, Any] | None:
        """Return what `explain` prints: the index's description, whose codebook it has, and its drift."""
        if self.index is None:
            return None
        ratio = self.drift_ratio
        drift = {"drift": round(ratio, 3)} if ratio is not None else {}
        return {**self.index.describe(), **self._notes, **drift}

    def _is_turn(self, index: Index, stop: int) -> bool:
        """Whether the rows that have left the window are an input, and there is something to train on them."""
        return has_codebook(index) and stop - index.stop_row >= self._config.index.min_rows

    def _take_turn(self, index: Index, table: Table, positions: Runs, first_row: int, stop: int) -> None:
        """Index the next input of a conversation in the way that the settings say."""
        start = index.stop_row
        if self._config.index.turns == REINDEX or index.n_rows == 0:
            self.build(table, positions, first_row)
            return
        keys, where = table.read_keys(start, stop), positions.at(np.arange(start, stop))
        settings = self._builder.iterations_for(stop - start)
        with self._builder.recorder.span("build", self.layer):
            built = self._builder.train(self.layer, start, keys, where, settings, self.query_moments)
        self.cancel()
        former = index.segments if isinstance(index, SegmentedIndex) else [index]
        whole = SegmentedIndex([*former, built.index], workspace=self._builder.workspace)
        self._take(replace(built, index=whole))

    def _should_train(self) -> bool:
        settings = self._config.index
        threshold, least = settings.reindex_drift, self._trained_rows * (1 + 1 / GROWTH)
        if settings.codebook == "auto":
            threshold = threshold if threshold is not None else REFINE_DRIFT
            least = max(least, settings.codebook_rows)  # of fewer rows comes no better codebook than the model's
        if threshold is None or settings.codebook == "model" or self.index is None:
            return False
        ratio = self.drift_ratio
        return ratio is not None and ratio > threshold and self.index.n_rows >= least

    def _give_up(self) -> None:
        """Forget a job that failed; the table trains again by itself only after it has grown."""
        self._job = None
        self._trained_rows = self.index.n_rows if self.index is not None else 0

    def _take(self, built: Built) -> None:
        self.index, self.drift, self._notes = built.index, built.drift, built.notes
        self._trained_rows, self._failed_stop = built.trained_rows, 0
        self.n_builds += built.trained

    def _add(self, index: Index, table: Table, positions: Runs, stop: int) -> None:
        self._add_to(index, self.drift, table, positions, stop)

    def _add_to(self, index: Index, drift: Drift | None, table: Table, positions: Runs, stop: int) -> None:
        start = index.stop_row
        if stop <= start:
            return
        keys = table.read_keys(start, stop)
        index.add(keys, positions.at(np.arange(start, stop)))
        if drift is not None:
            observe(drift, index, keys, start)
