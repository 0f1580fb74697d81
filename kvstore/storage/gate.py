"""A gate: many pass it together, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A lock for readers and one writer. Who waits to be alone lets nobody new in, so it never starves.

    Not to be entered twice by one thread: between the two somebody may wait to be alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Pass together with others."""
        with self._changed:
            while self._alone or self._waiting:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until nobody is inside, and pass alone."""
        with self._changed:
            self._waiting += 1
            try:
                while self._alone or self._inside:
                    self._changed.wait()
                self._alone = True
            finally:  # an interrupt too ends the waiting, or nobody would pass any more
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
