"""What a store did and when: on which thread, beside what."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from kvstore.errors import ConfigError


def now_us() -> float:
    """Microseconds of a clock that only goes forward."""
    return perf_counter_ns() / 1000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened from `start_us` to `stop_us`; `lane` is the thread's name, or what it was put under."""

    name: str
    lane: str
    start_us: float
    stop_us: float
    layer: int | None = None


class Timeline:
    """What happened while it was recorded, see `KVStore.timeline`; threads may add at the same time.

    Names: "step" (from its begin until its rows are visible; a lane for each sequence), "append", "commit" (indexes and
    disk), "build" (an index), "wait" (for an index), "attend", "search" (the part of attend that finds candidates),
    "save" (a sequence goes to the disk), "flush" (until it is written), "read" (an extent from the disk).

    Attributes:
        events: in the order in which they ended.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, name: str, start_us: float, stop_us: float, layer: int | None = None, lane: str = "") -> None:
        """Add what the calling thread has done."""
        self.events.append(Event(name, lane or threading.current_thread().name, start_us, stop_us, layer))

    def seconds(self, name: str) -> float:
        """Seconds in which something of this name was going on, once however often at the same time."""
        return sum(stop - start for start, stop in self._ranges(name)) / 1e6

    def overlap(self, name: str, other: str) -> float:
        """Seconds in which both were going on: `overlap("build", "step")` is what forward passes hid of the builds."""
        total_us = 0.0
        for start, stop in self._ranges(name):
            total_us += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in self._ranges(other))
        return total_us / 1e6

    def as_trace(self) -> dict[str, Any]:
        """Return it in Chrome's trace event format: times in microseconds from the first event on."""
        pid, zero = os.getpid(), min((event.start_us for event in self.events), default=0.0)
        lanes = {lane: number for number, lane in enumerate(self.lanes, 1)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        spans = [
            {
                "ph": "X", "name": event.name, "cat": "kvstore", "pid": pid, "tid": lanes[event.lane],
                "ts": event.start_us - zero, "dur": event.stop_us - event.start_us,
                "args": {} if event.layer is None else {"layer": event.layer},
            }
            for event in self.events
        ]  # fmt: skip
        return {"traceEvents": names + spans, "displayTimeUnit": "ms"}

    @property
    def lanes(self) -> list[str]:
        """Threads and sequences that something happened on, in the order of their first events."""
        first = sorted(self.events, key=lambda event: event.start_us)
        return list(dict.fromkeys(event.lane for event in first))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for ui.perfetto.dev or chrome://tracing; raises `ConfigError` when that cannot be done."""
        try:
            Path(path).write_text(json.dumps(self.as_trace()))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw it, a line for each lane; raises `ConfigError` without matplotlib, or when it cannot be written."""
        from kvstore.timeline_plot import draw

        draw(self, Path(path))

    def _ranges(self, name: str) -> list[tuple[float, float]]:
        return joined((event.start_us, event.stop_us) for event in self.events if event.name == name)


def joined(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return ranges (start, stop) ascending, those that meet made one.

    >>> joined([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    found: list[tuple[float, float]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
