"""Building a table's index beside everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codebooks import ModelCodebook
from kvstore.index.threads import kernel_threads
from kvstore.index_builder import Built, IndexBuilder, Moments
from kvstore.maintenance import Job
from kvstore.table import Table

THREADS = 1
"""Kernel threads of work in the background: decoding has the others."""


class Rebuild:
    """Work for `Maintenance`: an index over the rows [start, stop) of a table's snapshot.

    Rows never change, so they are read here and not copied before. A table that is truncated, rolled back or dropped
    meanwhile cancels its job: what was read then may be other rows, and is thrown away.
    """

    def __init__(
        self,
        builder: IndexBuilder,
        layer: int,
        snapshot: Table,
        start: int,
        stop: int,
        positions: npt.NDArray[np.int64],
        own: bool,
        moments: Moments | None,
    ) -> None:
        self._builder = builder
        self.layer = layer
        self._snapshot = snapshot
        self._rows = (start, stop)
        self._positions = positions
        self._moments = moments
        # What is shared is looked at now, on the thread of the store.
        self._codebook: ModelCodebook | None = None if own else builder.model_codebook(layer)
        self._settings: dict[str, Any] = builder.iterations_for(stop - start) if self._codebook is None else {}

    def __call__(self, job: Job[Built]) -> Built:
        """Read, train, encode; stops early when the result is not wanted."""
        start, stop = self._rows
        job.check_point()
        with self._builder.recorder.span("build", self.layer), kernel_threads(THREADS):
            keys = self._snapshot.read_keys(start, stop)
            job.check_point()
            if self._codebook is not None:
                return self._builder.encode(self.layer, start, keys, self._positions, self._codebook)
            return self._builder.train(
                self.layer, start, keys, self._positions, self._settings, self._moments, job.check_point
            )
