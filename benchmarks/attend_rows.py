"""Rows of the report about one layer's attention."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from benchmarks.attend_ours import RAW, ROPE
from benchmarks.attend_peers import BEST, LAYOUTS
from benchmarks.decode_rows import break_even
from benchmarks.report import Metric, Report

TIME = Metric("attend", "ms", "lower")
PROCESSOR = Metric("processor time of all threads", "ms", "lower")
GOAL = Metric("times as fast as torch's best", "times", "higher")
SCAN = Metric("of it the scan of the codes", "ms", "neither")
SELECT = Metric("of it softmax of the group and selection", "ms", "neither")
FETCH = Metric("of it rerank, fetch and attention", "ms", "neither")
REST = Metric("of it plan, checks and conversion", "ms", "neither")
BYTES = Metric("bytes that must move", "MiB", "lower")
FLOOR = Metric("time to read them", "ms", "lower")
OVER = Metric("time over that floor", "times", "lower")
ERROR = Metric("error against the same rows, exactly", "share", "neither")
FULL_ERROR = Metric("error against attention over all rows", "share", "neither")
MASS = Metric("attention mass caught", "share", "higher")
CROSSING = Metric("faster from length", "rows", "neither")
BANDWIDTH = Metric("memory read", "GB/s", "neither")
FULL, WHOLE, EXACT, LIMIT, TARGET = "full attention", "whole attend", "exact selection", "limit", "target"

TENTH = 0.1
TARGETS: Mapping[tuple[str, str, float | int], float] = {
    (ROPE, "float32", 1024): 10.0,
    (ROPE, "bfloat16", 1024): 6.0,
    (ROPE, "float32", TENTH): 4.0,
    (ROPE, "bfloat16", TENTH): 2.5,
    (RAW, "float32", 1024): 15.0,
    (RAW, "bfloat16", 1024): 15.0,
}
TARGET_ROWS = 131_072


@dataclass(frozen=True)
class Marks:
    """What ours is worth, means over queries.

    Attributes:
        moved_bytes: that have to be read at least.
        error: against exact attention over the same rows, full_error: over all rows.
        mass, exact_mass: caught by ours and by exact selection of as many rows.
    """

    moved_bytes: float
    error: float
    full_error: float
    mass: float
    exact_mass: float

    @classmethod
    def mean(cls, found: Sequence[Marks]) -> Marks:
        """Return the mean of each figure."""
        return cls(*(statistics.fmean(getattr(one, field.name) for one in found) for field in fields(cls)))


@dataclass(frozen=True)
class Found:
    """Medians of one index kind and budget at one length: an attend, and what it takes of the processor's time on all
    threads; the scan alone, the whole search, the rerank, fetch and attention after it; and what they are worth."""

    total_ms: float
    processor_ms: float
    scan_ms: float
    search_ms: float
    fetch_ms: float
    marks: Marks


@dataclass(frozen=True)
class Beside:
    """What ours is compared with: medians and errors of torch's layouts by name, the least processor time of them,
    bytes of all rows, bytes a second that can be read, largest error allowed."""

    torch_ms: Mapping[str, float]
    torch_processor_ms: float
    torch_errors: Mapping[str, float]
    full_bytes: float
    bytes_per_s: float
    limit: float


def budget_label(budget: float | int) -> str:
    """Return what tables call a budget.

    >>> budget_label(1024), budget_label(0.1)
    ('k = 1,024', '1/10')
    """
    from fractions import Fraction

    return f"k = {budget:,}" if isinstance(budget, int) else str(Fraction(budget).limit_denominator(1000))


def add_attend(
    report: Report, setting: tuple[str, str, float | int], n_rows: int, found: Found, beside: Beside
) -> float:
    """Add the rows of (kind, dtype, budget) at one length; return how many times as fast as torch's best it is."""
    kind, dtype, budget = setting
    case = f"{n_rows:,} rows, {dtype}, {kind}, {budget_label(budget)}"
    torch_ms, marks = beside.torch_ms, found.marks
    fastest = min(torch_ms, key=lambda name: torch_ms[name])
    best = torch_ms[fastest]
    for layout in LAYOUTS:
        report.add(case, TIME, found.total_ms, layout, torch_ms[layout])
    report.add(case, PROCESSOR, found.processor_ms, BEST, beside.torch_processor_ms)
    target = TARGETS.get(setting) if n_rows == TARGET_ROWS else None
    report.add(case, GOAL, best / found.total_ms, TARGET, target)
    scan = min(found.scan_ms, found.search_ms)  # a budget that covers all rows searches nothing
    select, rest = found.search_ms - scan, found.total_ms - found.search_ms - found.fetch_ms
    for metric, part in ((SCAN, scan), (SELECT, select), (FETCH, found.fetch_ms), (REST, rest)):
        report.add(case, metric, part, WHOLE, found.total_ms)
    ours, full = (1e3 * n_bytes / beside.bytes_per_s for n_bytes in (marks.moved_bytes, beside.full_bytes))
    report.add(case, BYTES, marks.moved_bytes / 2**20, FULL, beside.full_bytes / 2**20)
    report.add(case, FLOOR, ours, FULL, full)
    report.add(case, OVER, found.total_ms / ours, BEST, best / full)
    report.add(case, ERROR, marks.error, LIMIT, beside.limit)
    report.add(case, FULL_ERROR, marks.full_error, fastest, beside.torch_errors[fastest])
    report.add(case, MASS, marks.mass, EXACT, marks.exact_mass)
    return best / found.total_ms


def add_crossings(
    report: Report, gains: Mapping[tuple[str, str, float | int], Mapping[int, float]], lengths: Sequence[int]
) -> None:
    """Add from which length on ours is the faster one, by setting; gains are torch's best time over ours, by length."""
    for (kind, dtype, budget), by_length in gains.items():
        measured = [n for n in lengths if n in by_length]
        if measured:
            case = f"all lengths, {dtype}, {kind}, {budget_label(budget)}"
            report.add(case, CROSSING, break_even(measured, [by_length[n] for n in measured]), BEST, None)
