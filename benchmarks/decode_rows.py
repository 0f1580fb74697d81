"""The rows of the decode benchmark: what its figures are called and what each is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.engines import DENSE_PEERS, DYNAMIC, STORE
from benchmarks.memory import Usage
from benchmarks.quality import DEFAULT, EXACT, RANDOM, Scores
from benchmarks.report import Metric, Report
from benchmarks.speed import Speed, budget_name
from benchmarks.split import Split

DECODE = Metric("decode", "tokens/s", "higher")
FIRST_TOKEN = Metric("first token", "s", "lower")
DIFFERENCE = Metric("largest logit difference", "logits", "neither")
PEAK = Metric("peak memory", "MiB", "lower")
HELD = Metric("cache memory", "MiB", "lower")
BREAK_EVEN = Metric("faster from length", "tokens", "neither")
KL = Metric("KL to full", "nats/token", "lower")
AGREEMENT = Metric("same likeliest token", "share", "higher")
DELTA_NLL = Metric("NLL above full", "nats/token", "neither")
STEP = Metric("step, taken apart", "ms", "neither")
SEARCH = Metric("of it attention: search", "ms", "neither")
FETCH = Metric("of it attention: rerank, fetch, softmax", "ms", "neither")
PLAN = Metric("of it plan, checks and conversion", "ms", "neither")
ROWS_IN = Metric("of it append", "ms", "neither")
COMMIT = Metric("of it commit", "ms", "neither")
ADAPTER = Metric("of it the rest of the adapter", "ms", "neither")
REST = Metric("of it the model", "ms", "neither")
OUTSIDE = Metric("engine time outside attention", "share of a step", "lower")
APPEND = Metric("append", "us a token and layer", "neither")
COMMIT_TOKEN = Metric("commit", "us a token", "neither")
CLOCKING = Metric("clocking, in the figures above", "ms", "neither")
WHOLE, APART, TARGET, CLOCKED = "whole step", "not taken apart", "target", "of it clocking"
OUTSIDE_TARGET = 0.15
EVENTS_OF_CALL = 2  # of an append or commit: the benchmark's, and the span that the store tells of
MIB = 1 << 20


def add_speed(report: Report, length: int, speed: Speed, budgets: Sequence[float]) -> None:
    """Add how exact a full budget is, the times to the first token and the rates of decoding."""
    where = place(length, speed)
    report.add(f"{where}, {budget_name(None)}", DIFFERENCE, speed.logit_difference[STORE], DYNAMIC, 0.0)
    for peer in DENSE_PEERS if speed.first_token_s else ():
        report.add(f"{where}, store", FIRST_TOKEN, speed.first_token_s[STORE], peer, speed.first_token_s[peer])
    for budget in (None, *budgets):
        case, rate = f"{where}, {budget_name(budget)}", speed.tokens_per_s[budget]
        for peer in DENSE_PEERS:
            report.add(case, DECODE, rate, peer, speed.tokens_per_s[peer])
        if budget is not None:
            report.add(case, DECODE, rate, budget_name(None), speed.tokens_per_s[None])


def place(length: int, speed: Speed) -> str:
    """Return how cases of a length begin."""
    return f"{length} tokens (cost only)" if speed.cost_only else f"{length} tokens"


def add_splits(report: Report, length: int, speed: Speed) -> None:
    """Add where a step's time goes, by budget."""
    for budget, split in speed.splits.items():
        _add_split(report, f"{place(length, speed)}, {budget_name(budget)}", split, speed.tokens_per_s[budget])


def _add_split(report: Report, case: str, split: Split, tokens_per_s: float) -> None:
    """Add the rows of one split, beside the rate of blocks that were not taken apart."""
    report.add(case, STEP, 1e3 * split.step_s, APART, 1e3 / tokens_per_s)
    parts = {
        SEARCH: split.search_s,
        FETCH: split.fetch_s,
        PLAN: split.plan_s,
        ROWS_IN: split.append_s,
        COMMIT: split.commit_s,
        ADAPTER: split.other_s,
        REST: split.model_s,
        CLOCKING: split.measuring_s,
    }
    for metric, seconds in parts.items():
        report.add(case, metric, 1e3 * seconds, WHOLE, 1e3 * split.step_s)
    report.add(case, OUTSIDE, split.outside_s / split.step_s, TARGET, OUTSIDE_TARGET)
    clocked_us = 1e6 * EVENTS_OF_CALL * split.event_s
    report.add(case, APPEND, 1e6 * split.append_s / split.n_layers, CLOCKED, clocked_us)
    report.add(case, COMMIT_TOKEN, 1e6 * split.commit_s, CLOCKED, clocked_us)


def add_memory(report: Report, length: int, usage: Mapping[str, Usage]) -> None:
    """Add peaks and what caches hold, ours beside each peer that was measured."""
    ours = usage[STORE]
    peers = {name: theirs for name, theirs in usage.items() if name != STORE}
    for peer, theirs in peers.items():
        report.add(f"{length} tokens, store", PEAK, ours.peak_bytes / MIB, peer, theirs.peak_bytes / MIB)
    for peer, theirs in peers.items():
        report.add(f"{length} tokens, store", HELD, ours.held_bytes / MIB, peer, theirs.held_bytes / MIB)


def add_break_even(report: Report, speeds: Mapping[int, Speed], budgets: Sequence[float]) -> None:
    """Add the lengths from which on a full budget, and each of budgets, is faster than each peer; and each of budgets
    than our own full budget."""
    for budget in (None, *budgets):
        others: dict[str, str | None] = {peer: peer for peer in DENSE_PEERS}
        if budget is not None:
            others = {budget_name(None): None, **others}
        for name, key in others.items():
            gains = [speed.tokens_per_s[budget] / speed.tokens_per_s[key] for speed in speeds.values()]
            report.add(f"all lengths, {budget_name(budget)}", BREAK_EVEN, break_even(list(speeds), gains), name, None)


def add_quality(
    report: Report, n_context: int, n_tokens: int, budgets: Sequence[float], found: Mapping[tuple[float, str], Scores]
) -> None:
    """Add divergence, agreement and likelihood of the default index, beside exact selection and the control."""
    for budget in budgets:
        case = f"{n_tokens} tokens after {n_context}, {budget_name(budget)}"
        ours = found[budget, DEFAULT]
        for peer in (EXACT, RANDOM):
            theirs = found[budget, peer]
            report.add(case, KL, ours.kl, peer, theirs.kl)
            report.add(case, AGREEMENT, ours.agreement, peer, theirs.agreement)
            report.add(case, DELTA_NLL, ours.delta_nll, peer, theirs.delta_nll)


def break_even(lengths: Sequence[int], gains: Sequence[float]) -> float | None:
    """Length from which on gains (one rate over another) stay at 1 or above, on a line between lengths measured.

    The first length when gains are never below 1, None when they are below it at the last.

    >>> break_even([1000, 2000], [0.9, 1.3])
    1250.0
    """
    if gains[-1] < 1:
        return None
    for i in reversed(range(len(gains) - 1)):
        if gains[i] < 1:
            share = (1 - gains[i]) / (gains[i + 1] - gains[i])
            return lengths[i] + share * (lengths[i + 1] - lengths[i])
    return float(lengths[0])
