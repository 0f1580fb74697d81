"""Choosing an index for a model: many kinds and sizes measured on its traces, and the best of them as settings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstore.config import IndexConfig, StoreConfig
from kvstore.errors import ConfigError
from kvstore.index.base import Index
from kvstore.index.registry import index_kinds
from kvstore.index.rows import RowView
from kvstore.index.weighting import QUERIES
from kvstore.quality import Exam, Method, Quality, build_index, index_picker
from kvstore.traces import Trace

OVER_FETCHES = (1.0, 2.0, 3.0)
ROPE_SIZES = ((1, 6), (1, 8), (2, 6), (2, 8), (4, 8))
RAW_SIZES = ((2, 6), (4, 8), (8, 8))
GOOD_ENOUGH = 0.99
"""Share of exact selection's `mid` that the index chosen must reach; of those that do the smallest wins."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Trial:
    """One method and what was measured; means over layers.

    Attributes:
        name: of the method in words. method: kind, options and over-fetch. quality: at the budget.
        bytes_per_key: of codes. search_ms: median of a search in one layer, without the rerank.
        on_front: whether no other trial is as small and better, or as good and smaller (bytes and `mid`).
    """

    name: str
    method: Method
    quality: Quality
    bytes_per_key: float
    search_ms: float
    on_front: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {**asdict(self), "method": {**asdict(self.method), "options": dict(self.method.options)}}


@dataclass(frozen=True)
class Tuning:
    """All trials at one budget, the exact selection they are measured against, and the settings chosen."""

    budget: float
    exact: Quality
    trials: tuple[Trial, ...]

    @property
    def chosen(self) -> Trial:
        """The smallest of the trials that are good enough, the fastest of equals; the best one if none is."""
        good = [trial for trial in self.trials if trial.quality.mid >= GOOD_ENOUGH * self.exact.mid]
        if good:
            return min(good, key=lambda trial: (trial.bytes_per_key, trial.search_ms))
        return max(self.trials, key=lambda trial: trial.quality.mid)

    @property
    def config(self) -> StoreConfig:
        """Settings of a store with the index chosen."""
        method = self.chosen.method
        index = IndexConfig(kind=method.kind, options=dict(method.options), over_fetch=method.over_fetch)
        return StoreConfig(budget=self.budget, index=index)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        trials = [trial.as_dict() for trial in self.trials]
        config = asdict(self.config)
        return {"budget": self.budget, "exact": asdict(self.exact), "trials": trials, "config": config}


def default_grid(trace: Trace, kinds: Sequence[str] | None = None) -> list[Method]:
    """Return the methods to try for keys like the trace's, over-fetch 1; `kinds` limits them to kinds of these names.

    Raises `ConfigError` for a kind that does not exist.
    """
    known = [kind for kind in index_kinds() if kind != "flat"]
    wanted = known if kinds is None else list(dict.fromkeys(kinds))
    if strange := sorted(set(wanted) - set(known)):
        raise ConfigError(f"no kinds of index {', '.join(map(repr, strange))}; there are {', '.join(known)}")
    found = []
    for kind in wanted:
        found += [Method(kind, options) for options in _pq_options(trace)] if kind == "pq" else [Method(kind)]
    return found


def tune(traces: Sequence[Trace], methods: Iterable[Method], budget: float, tell: Tell) -> Tuning:
    """Measure each method with each over-fetch on all traces; `budget` is the share of rows that is picked.

    Raises `ConfigError` for a budget out of (0, 1) or no methods.
    """
    methods = list(methods)
    if not 0 < budget < 1 or not methods:
        raise ConfigError(f"tuning needs a budget between 0 and 1 and at least one method, not {budget}, {methods}")
    tell("exact attention", 0, 0)
    exams = [Exam(trace) for trace in traces]
    exact = Quality.mean(exam.mark(exam.exact, budget) for exam in exams)
    trials: list[Trial] = []
    for number, method in enumerate(methods):
        tell("trying kinds of index", number, len(methods))
        trials += _try(exams, method, budget)
    return Tuning(budget, exact, tuple(with_front(trials)))


def with_front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials by size and quality, those on the Pareto front (fewest bytes, highest `mid`) marked."""
    ordered = sorted(trials, key=lambda trial: (trial.bytes_per_key, -trial.quality.mid))
    best, marked = float("-inf"), []
    for trial in ordered:
        marked.append(replace(trial, on_front=trial.quality.mid > best))
        best = max(best, trial.quality.mid)
    return marked


def method_name(method: Method) -> str:
    """Name a method.

    >>> method_name(Method("pq", {"space": "rope", "m": 1, "bits": 8}, over_fetch=2.0))
    'pq rope 1x8, over-fetch 2'
    """
    options = dict(method.options)
    size = f"{options.pop('space', '')} {options.pop('m', '')}x{options.pop('bits', '')}".strip()
    rest = [f"{key}={value}" for key, value in options.items()]
    name = " ".join([method.kind, *([size] if size != "x" else []), *rest])
    return name if method.over_fetch == 1 else f"{name}, over-fetch {method.over_fetch:g}"


def _pq_options(trace: Trace) -> list[dict[str, Any]]:
    spaces = [("raw", RAW_SIZES)] if trace.rope is None else [("rope", ROPE_SIZES), ("raw", RAW_SIZES)]
    pairs = trace.head_dim // 2
    found = [{"space": space, "m": m, "bits": b} for space, sizes in spaces for m, b in sizes if pairs % m == 0]
    if trace.q_cal is not None:
        found += [{**options, "weighting": QUERIES} for options in found]
    return found


def _try(exams: Sequence[Exam], method: Method, budget: float) -> list[Trial]:
    """Return the trials of one index, built once, with each over-fetch."""
    marks: dict[float, list[Quality]] = {over_fetch: [] for over_fetch in OVER_FETCHES}
    times: dict[float, list[float]] = {over_fetch: [] for over_fetch in OVER_FETCHES}
    n_bytes = []
    for exam in exams:
        index = build_index(exam, method)
        n_bytes.append(index.code_bytes_per_key)
        pick = index_picker(exam, index)
        for over_fetch in OVER_FETCHES:
            marks[over_fetch].append(exam.mark(exam.reranked(pick, over_fetch), budget))
            times[over_fetch].append(_search_ms(exam, index, round(over_fetch * exam.rows_of(budget))))
    found = []
    for over_fetch in OVER_FETCHES:
        used = replace(method, over_fetch=over_fetch)
        quality, search_ms = Quality.mean(marks[over_fetch]), statistics.mean(times[over_fetch])
        found.append(Trial(method_name(used), used, quality, statistics.mean(n_bytes), search_ms))
    return found


def _search_ms(exam: Exam, index: Index, k: int) -> float:
    view, seconds = RowView.of(exam.trace.keys), []
    for i in range(min(9, exam.trace.n_queries)):
        q = exam.trace.queries(i)
        started = time.perf_counter()
        index.search(q, k, view, scale=exam.trace.scale)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)
