"""Makes indexes: whose codebook they use, how it is trained, and what error to expect of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codebooks import Codebooks, ModelCodebook, has_codebook
from kvstore.config import ADAPTIVE, StoreConfig
from kvstore.drift import Drift, sample_rows
from kvstore.errors import ConfigError
from kvstore.index.base import Index
from kvstore.index.registry import make_index
from kvstore.index.workspace import Workspace
from kvstore.iterations import Iterations
from kvstore.recorder import Recorder
from kvstore.schema import Schema

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Moments = npt.NDArray[np.float64]

REFERENCE_ROWS = 256
"""Trained rows from which the error to expect is estimated."""


@dataclass(slots=True)
class Built:
    """An index and where it came from.

    Attributes:
        index: covers the rows it was built over.
        trained: whether K-Means ran. trained_rows: rows its codebook was trained on, 0 when it is the model's.
        drift: None for kinds without a codebook.
        notes: what `explain` adds to the index's own description.
    """

    index: Index
    trained: bool
    trained_rows: int
    drift: Drift | None
    notes: dict[str, Any]


class IndexBuilder:
    """Builds the indexes of a store. `train` and `encode` may run in the background: they touch nothing shared."""

    def __init__(self, schema: Schema, config: StoreConfig, workspace: Workspace) -> None:
        self.schema = schema
        self.config = config
        self.workspace = workspace  # the store's: one set of scratch buffers serves every index
        self.codebooks = Codebooks(schema, lambda layer, codebook: self.empty(layer, 0, codebook=codebook))
        self.iterations = Iterations(schema, config.index)
        self.recorder = Recorder()

    def empty(self, layer: int, first_row: int, **more: Any) -> Index:
        """Return an empty index of the configured kind; raises `ConfigError` when none can be made."""
        settings = self.config.index
        try:
            return make_index(
                settings.kind,
                self.schema.n_kv_heads,
                self.schema.head_dim,
                first_row=first_row,
                rope=self.schema.rope[layer] if self.schema.rope else None,
                seed=settings.seed,
                workspace=self.workspace,
                **settings.options,
                **more,
            )
        except TypeError as error:  # a setting that the kind does not have
            raise ConfigError(f"no index of kind {settings.kind!r} with {settings.options}: {error}") from error

    @property
    def wants_queries(self) -> bool:
        """Whether training asks what queries are like."""
        return self.config.index.options.get("weighting") is not None

    def may_begin(self, layer: int) -> bool:
        """Whether a build that begins before the commit gives what one at the commit would give.

        Not while the layer lacks the model's codebook: who gives it is the first to commit. Nor while it is not known
        how many iterations hide behind a forward pass.
        """
        if self.config.index.codebook != "sequence" and self.model_codebook(layer) is None:
            return False
        return self.config.index.iterations != ADAPTIVE or self.iterations.compute is not None

    def build(
        self, layer: int, first_row: int, keys: FloatArray, positions: IntArray, moments: Moments | None = None
    ) -> Built:
        """Return an index over rows with the codebook that the settings ask for.

        With codebook "model" or "auto" and none in the catalog, one that saw enough rows becomes the model's.
        `moments` are those of the queries seen, see `query_moments`.
        """
        found = self.model_codebook(layer)
        if found is not None:
            return self.encode(layer, first_row, keys, positions, found)
        built = self.train(layer, first_row, keys, positions, self.iterations_for(keys.shape[1]), moments)
        if not self.may_donate(layer, built.index.n_rows) or not has_codebook(built.index):
            return built
        found = self._donate(layer, built.index, keys)
        shared = self.encode(layer, first_row, keys, positions, found)
        shared.trained = True
        return shared

    def train(
        self,
        layer: int,
        first_row: int,
        keys: FloatArray,
        positions: IntArray,
        settings: dict[str, Any],
        moments: Moments | None = None,
        check_point: Callable[[], None] = lambda: None,
    ) -> Built:
        """Return an index over rows whose codebook was trained on them. `settings` are those of `iterations_for`."""
        notes = dict(settings["notes"])
        index = self.empty(layer, first_row, **settings["options"])
        index.train(keys, positions, **({} if moments is None else {"moments": moments}))
        check_point()
        index.add(keys, positions)
        drift = None
        if has_codebook(index):
            drift = Drift(self._expected_error(index, keys))
            notes = {"codebook": "sequence", **notes}
        elif self.config.index.codebook != "sequence":
            notes["codebook"] = f"ignored, {self.config.index.kind} has none"
        return Built(index, True, keys.shape[1], drift, notes)

    def encode(self, layer: int, first_row: int, keys: FloatArray, positions: IntArray, found: ModelCodebook) -> Built:
        """Return an index over rows that uses a codebook of the catalog."""
        index = self.empty(layer, first_row, codebook=found.codebook)
        index.add(keys, positions)
        drift = Drift(found.error)
        observe(drift, index, keys, first_row)
        return Built(index, False, 0, drift, {"codebook": f"model v{found.version}"})

    def iterations_for(self, rows: int) -> dict[str, Any]:
        """Return the options of a training and what to say of it; asks the cost model, so not in the background."""
        chosen = self.iterations.choose(rows)
        if self.config.index.iterations is None:
            return {"options": {}, "notes": {}}
        options = {"iterations": chosen.count} if chosen.count is not None else {}
        return {"options": options, "notes": {"iterations": f"{chosen.count or ''} {chosen.reason}".strip()}}

    def calibrate(
        self, layer: int, first_row: int, keys: FloatArray, positions: IntArray, moments: Moments | None = None
    ) -> ModelCodebook:
        """Train the model's codebook of a layer on these rows, whatever the settings say of using it.

        Raises `ConfigError` for a kind of index that has no codebook.
        """
        kind = self.config.index.kind
        if kind == "flat" or not has_codebook(self.empty(layer, first_row)):
            raise ConfigError(f"an index of kind {kind!r} has no codebook to train")
        built = self.train(layer, first_row, keys, positions, self.iterations_for(keys.shape[1]), moments)
        return self._donate(layer, built.index, keys)

    def model_codebook(self, layer: int) -> ModelCodebook | None:
        """Return the codebook that a new index starts from, or None when it trains its own."""
        return self.codebooks.get(layer) if self.config.index.codebook != "sequence" else None

    def may_donate(self, layer: int, rows: int) -> bool:
        """Whether the layer lacks a model codebook that a training on so many rows could give."""
        settings = self.config.index
        if settings.codebook == "sequence" or settings.kind == "flat" or rows < settings.codebook_rows:
            return False
        return self.codebooks.get(layer) is None

    def _donate(self, layer: int, index: Index, keys: FloatArray) -> ModelCodebook:
        codebook = index.codebook  # type: ignore[attr-defined]
        return self.codebooks.put(layer, codebook, self._expected_error(index, keys), index.n_rows)

    def _expected_error(self, index: Index, keys: FloatArray) -> FloatArray:
        """Mean squared error of rows like those the index was trained on and covers, float32 [n_kv_heads]."""
        rows = sample_rows(index.first_row, index.stop_row, REFERENCE_ROWS)
        sampled = keys[:, rows - index.first_row]
        errors: FloatArray = index.errors(sampled, rows, held_out=True).mean(axis=1)  # type: ignore[attr-defined]
        return errors


def observe(drift: Drift, index: Index, keys: FloatArray, start: int) -> None:
    """Tell a drift estimate of the rows [start, ...) that have just been added, keys [n_kv_heads, n, head_dim]."""
    rows = sample_rows(start, start + keys.shape[1])
    drift.observe(index.errors(keys[:, rows - start], rows))  # type: ignore[attr-defined]
