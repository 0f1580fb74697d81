"""The rows of the decode benchmark: what its figures are called and what each is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.engines import DENSE_PEERS, DYNAMIC, STORE
from benchmarks.memory import Usage
from benchmarks.quality import DEFAULT, EXACT, RANDOM, Scores
from benchmarks.report import Metric, Report
from benchmarks.speed import Speed, budget_name

DECODE = Metric("decode", "tokens/s", "higher")
FIRST_TOKEN = Metric("first token", "s", "lower")
DIFFERENCE = Metric("largest logit difference", "logits", "neither")
PEAK = Metric("peak memory", "MiB", "lower")
HELD = Metric("cache memory", "MiB", "lower")
BREAK_EVEN = Metric("faster from length", "tokens", "neither")
KL = Metric("KL to full", "nats/token", "lower")
AGREEMENT = Metric("same likeliest token", "share", "higher")
DELTA_NLL = Metric("NLL above full", "nats/token", "neither")
MIB = 1 << 20


def add_speed(report: Report, length: int, speed: Speed, budgets: Sequence[float]) -> None:
    """Add how exact a full budget is, the times to the first token and the rates of decoding."""
    where = f"{length} tokens"
    report.add(f"{where}, {budget_name(None)}", DIFFERENCE, speed.logit_difference[STORE], DYNAMIC, 0.0)
    for peer in DENSE_PEERS:
        report.add(f"{where}, store", FIRST_TOKEN, speed.first_token_s[STORE], peer, speed.first_token_s[peer])
    for budget in (None, *budgets):
        case, rate = f"{where}, {budget_name(budget)}", speed.tokens_per_s[budget]
        for peer in DENSE_PEERS:
            report.add(case, DECODE, rate, peer, speed.tokens_per_s[peer])
        if budget is not None:
            report.add(case, DECODE, rate, budget_name(None), speed.tokens_per_s[None])


def add_memory(report: Report, length: int, usage: Mapping[str, Usage]) -> None:
    """Add peaks and what caches hold, ours beside each peer that was measured."""
    ours = usage[STORE]
    peers = {name: theirs for name, theirs in usage.items() if name != STORE}
    for peer, theirs in peers.items():
        report.add(f"{length} tokens, store", PEAK, ours.peak_bytes / MIB, peer, theirs.peak_bytes / MIB)
    for peer, theirs in peers.items():
        report.add(f"{length} tokens, store", HELD, ours.held_bytes / MIB, peer, theirs.held_bytes / MIB)


def add_break_even(report: Report, speeds: Mapping[int, Speed], budget: float) -> None:
    """Add the lengths from which on that budget decodes faster than our own full budget, and than each peer."""
    others: dict[str, str | None] = {budget_name(None): None, **{peer: peer for peer in DENSE_PEERS}}
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
