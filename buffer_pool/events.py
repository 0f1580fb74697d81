"""Events: marks in a device's stream of work that say when everything before them is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """The part of `torch.cuda.Event` that a pool needs."""

    def query(self) -> bool:
        """Whether all work recorded before the event is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class NullEvent:
    """The event of a device that works in step with Python: it has happened already."""

    def query(self) -> bool:
        """Say yes."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


Recorder = Callable[[], Event]
"""Records an event behind the work that the caller has given to the device so far."""


def event_recorder(device: torch.device) -> Recorder:
    """Return how events are recorded: on the caller's current stream for CUDA, `NullEvent` elsewhere."""
    if device.type != "cuda":
        return NullEvent

    def record() -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return record
