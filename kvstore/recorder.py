"""Says what happens, and when, to a timeline, while somebody wants one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from kvstore.errors import ConfigError
from kvstore.timeline import Timeline, now_us


class Span:
    """Something that is happening; `end`, or leaving its context, says that it is over."""

    __slots__ = ("_began_us", "_lane", "_layer", "_name", "_timeline")

    def __init__(self, timeline: Timeline | None, name: str = "", layer: int | None = None, lane: str = "") -> None:
        """Without a timeline nothing is told."""
        self._timeline, self._name, self._layer, self._lane = timeline, name, layer, lane
        self._began_us = now_us() if timeline is not None else 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """It is over; a second call does nothing."""
        if self._timeline is not None:
            self._timeline.add(self._name, self._began_us, now_us(), self._layer, self._lane)
            self._timeline = None


OFF = Span(None)
"""What nobody records."""


class Recorder:
    """One a store; its parts tell it what they do. While nothing is recorded that costs a look at `timeline`."""

    __slots__ = ("timeline",)

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def span(self, name: str, layer: int | None = None, lane: str = "") -> Span:
        """Begin something on the calling thread, or on a lane of its own; see `Timeline` for the names."""
        return OFF if self.timeline is None else Span(self.timeline, name, layer, lane)

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Record while the context is open; raises `ConfigError` when that is being done already."""
        if self.timeline is not None:
            raise ConfigError("a timeline is being recorded already; leave its context first")
        self.timeline = Timeline()
        try:
            yield self.timeline
        finally:
            self.timeline = None
