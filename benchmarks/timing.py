"""Timing of competitors in turn, so that whatever slows the machine slows them all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

Tell = Callable[[str], None]
"""Is given a line of progress."""


@dataclass(frozen=True)
class Contender:
    """One competitor.

    Attributes:
        name: of the competitor, unique in a run.
        run: what is timed.
        scope: returns a context in which run is called, for preparing and clearing up; not timed.
    """

    name: str
    run: Callable[[], object]
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


def interleave(contenders: Sequence[Contender], rounds: int, tell: Tell | None = None) -> dict[str, list[float]]:
    """Run every contender once a round; return the seconds of each, one figure a round.

    Each round begins with another contender, so that none is always the first. Garbage is collected before each
    round and never while a contender runs.
    """
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"contenders need names of their own, not {names}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        gc.collect()
        for contender in _rotated(contenders, number):
            if tell is not None:
                tell(f"round {number + 1} of {rounds}: {contender.name}")
            with contender.scope(), _without_gc():
                started = time.perf_counter()
                contender.run()
                seconds[contender.name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each contender's figures."""
    return {name: statistics.median(figures) for name, figures in seconds.items()}


def _rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    by %= max(1, len(contenders))
    return [*contenders[by:], *contenders[:by]]


@contextmanager
def _without_gc() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
