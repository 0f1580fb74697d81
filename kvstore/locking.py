"""One thread at a time, in the process that made the store."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvstore.errors import ForkedStoreError


class StoreLock:
    """Held by every public call of a store and its sequences: a thread waits for another's call to end.

    A forked child has a copy of the memory but none of the threads, and shares the disk: it is refused.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # calls make other calls

    def __enter__(self) -> None:
        if os.getpid() != self._pid:  # before the lock: a thread that is not here may hold it
            raise ForkedStoreError(
                f"the store was opened by process {self._pid}, this is {os.getpid()}; open it here, with readonly=True"
            )
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


class Locked(Protocol):
    """What has a lock."""

    _lock: StoreLock


Self = TypeVar("Self", bound=Locked)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def locked(method: Callable[Concatenate[Self, Given], Result]) -> Callable[Concatenate[Self, Given], Result]:
    """Make a method hold its object's lock; raises `ForkedStoreError` in a forked child."""

    def call(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Call the method with the lock held."""
        with self._lock:
            return method(self, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call
