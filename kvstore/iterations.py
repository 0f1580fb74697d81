"""How many K-Means iterations a training gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config import ADAPTIVE, IndexConfig
from kvstore.index.cost_cache import cached_clustering, machine_fingerprint
from kvstore.index.cost_model import ClusteringCost, ComputeCost, fit_clustering, fit_compute, max_iterations
from kvstore.schema import Schema

LENGTHS_TO_FIT = 3  # the model has three coefficients
MOST_LENGTHS = 64


@dataclass(frozen=True, slots=True)
class Chosen:
    """A number of iterations (None: the kind's default) and, in words, why."""

    count: int | None
    reason: str


class Iterations:
    """The settings' number, the kind's default, or what hides behind a layer's forward pass on this machine.

    Attributes:
        compute: cost of a layer's forward pass; None until `measured` or `observed` was told of it.
        clustering: cost of K-Means; fitted (or read from the user's cache) when first needed, may be set.
        directory: where fits are kept; None means the user's cache.
    """

    def __init__(self, schema: Schema, settings: IndexConfig) -> None:
        self._schema = schema
        self._settings = settings
        self.compute: ComputeCost | None = None
        self.clustering: ClusteringCost | None = None
        self.directory: Path | None = None
        self._is_given = False
        self._fastest: dict[int, float] = {}  # tokens -> seconds, the lengths seen last

    def measured(self, samples: Iterable[tuple[int, float]]) -> None:
        """Take (tokens, seconds of one layer's forward pass) that an adapter has measured; see `fit_compute`."""
        self.compute = fit_compute(samples)
        self._is_given = True

    def observed(self, tokens: int, seconds: float) -> None:
        """Take one forward pass of one layer, as an adapter sees it: the model is fitted to the fastest of each length.

        Of fewer lengths than the model has coefficients, the time a token of the newest is taken: right for that
        prompt, which is the one about to be indexed. Nothing is done once `measured` has given a model, and for
        numbers that are not positive, as too coarse a clock gives them.
        """
        if self._is_given or tokens < 1 or not 0 < seconds < float("inf"):
            return
        best = min(seconds, self._fastest.pop(tokens, seconds))
        self._fastest[tokens] = best
        while len(self._fastest) > MOST_LENGTHS:
            del self._fastest[next(iter(self._fastest))]
        if len(self._fastest) >= LENGTHS_TO_FIT:
            self.compute = fit_compute(self._fastest.items())
        else:
            self.compute = ComputeCost(0.0, best / tokens, 0.0)

    def choose(self, rows: int) -> Chosen:
        """Return the iterations for a training on so many rows."""
        wanted = self._settings.iterations
        if wanted is None:
            return Chosen(None, "default")
        if isinstance(wanted, int):
            return Chosen(wanted, "as set")
        if self.compute is None:
            return Chosen(None, "default, no compute cost was measured")
        if self.clustering is None:
            self.clustering = self._fit()
        return Chosen(max_iterations(self.clustering, self.compute, rows), ADAPTIVE)

    def _fit(self) -> ClusteringCost:
        s = self._schema
        options = {k: v for k, v in self._settings.options.items() if k not in ("iterations", "seed")}
        options.setdefault("space", "raw")  # rows are turned back once, iterations cost the same in both spaces
        rope: dict[str, Any] = {}
        if options["space"] == "rope":
            rope["rope"] = next(spec for spec in s.rope if spec is not None)
        elif s.rope and any(s.rope):
            options = {"m": 1, "bits": 8} | options  # what "rope", the default there, takes
        fingerprint = machine_fingerprint(n_kv_heads=s.n_kv_heads, head_dim=s.head_dim, **options)
        return cached_clustering(
            fingerprint, lambda: fit_clustering(s.n_kv_heads, s.head_dim, **options, **rope), self.directory
        )
