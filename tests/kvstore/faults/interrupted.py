"""Threads that cannot be had, and Ctrl-C while the main thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kvstore.faults.failing import Faults

WAITS = [(threading.Condition, "wait"), (threading.Thread, "join"), (Future, "result")]


@contextmanager
def threads_that_are_not_to_be_had(faults: Faults) -> Iterator[Faults]:
    """Have those starts of threads fail that `faults` says."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        """Start the thread, or say what Python says when the system has none left."""
        faults.before("start", RuntimeError("can't start new thread"))
        real(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield faults


@contextmanager
def interrupts_while_waiting(faults: Faults) -> Iterator[Faults]:
    """Press Ctrl-C in those waits of the main thread that `faults` says."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in WAITS:
            patch.setattr(kind, name, _interrupted(getattr(kind, name), name, faults))
        yield faults


def _interrupted(real: Callable[..., Any], name: str, faults: Faults) -> Callable[..., Any]:
    """Wrap a call that waits."""

    def call(*args: Any, **kwargs: Any) -> Any:
        """Wait, unless it is interrupted."""
        if threading.current_thread() is threading.main_thread():
            faults.before(name, KeyboardInterrupt())  # type: ignore[arg-type]
        return real(*args, **kwargs)

    return call
