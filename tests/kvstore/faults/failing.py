"""Calls of the system, and of LMDB, that fail when they are made to."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lmdb
import pytest

from kvstore.errors import StorageError
from kvstore.storage.lmdb_file import LmdbFile
from tests.kvstore.faults.workload import Op

SYSTEM = [(os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "ftruncate"), (tempfile, "mkstemp")]
SPILL = ["read", "record_keys", "usage", "copy_to", "sync"]
WITHIN = ["spill.put", "spill.before_commit"]
FOR_EVER = 1 << 30
OPS: list[Op] = [
    ("step", "a", 0, 45),
    ("step", "b", 100, 60),
    ("flush",),
    ("step", "a", 45, 16),
    ("fork", "a", "c"),
    ("truncate", "a", 50),
    ("unload", "b"),
    ("checkpoint",),
    ("drop", "b"),
    ("step", "c", 300, 45),
    ("vacuum",),
    ("read", "a"),
    ("step", "d", 200, 7),
]
"""One of each kind of operation, and rows that are not on disk at the end."""


class Faults:
    """Counts calls, of all threads, and makes some of them fail.

    Attributes:
        first, last: numbers of the calls that fail, counted from 1; none do when first is 0.
        within: the error of a transaction that fails in the middle.
        n_calls: how many there were.
        failed: those that were made to fail.
    """

    def __init__(self, first: int = 0, n: int = 1, within: type[Exception] = lmdb.DiskError) -> None:
        self.first, self.last = first, first + n - 1
        self.within = within
        self.n_calls = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def heal(self) -> None:
        """No call fails from now on."""
        self.first = self.last = 0

    def before(self, name: str, error: Exception) -> None:
        """Count a call; raises the error when it is to fail."""
        with self._lock:
            self.n_calls += 1
            if not self.first <= self.n_calls <= self.last:
                return
            self.failed.append(name)
        raise error


def failing(real: Callable[..., Any], name: str, faults: Faults, error: Callable[[], Exception]) -> Callable[..., Any]:
    """Wrap a function so that it may fail before anything is done."""

    def call(*args: Any, **kwargs: Any) -> Any:
        faults.before(name, error())
        return real(*args, **kwargs)

    return call


def system_error() -> OSError:
    """What the system says about a disk that does not answer."""
    return OSError(5, "made to fail")


def storage_error() -> StorageError:
    """What becomes of an error of LMDB."""
    return StorageError(5, "made to fail")


@contextmanager
def disk_that_fails(faults: Faults) -> Iterator[Faults]:
    """Have every call fail that `faults` says: before it is made, or in the middle of a transaction."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in SYSTEM:
            patch.setattr(module, name, failing(getattr(module, name), name, faults, system_error))
        for name in SPILL:
            patch.setattr(LmdbFile, name, failing(getattr(LmdbFile, name), name, faults, storage_error))
        patch.setattr(LmdbFile, "_write_once", _failing_within(LmdbFile._write_once, faults))
        yield faults


def _failing_within(real: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    """Wrap the function that writes a transaction so that it may fail in the middle."""

    def write(self: LmdbFile, batches: Any, usage: Any, hook: Any) -> Any:
        def inner(point: str) -> None:
            hook(point)
            if point in WITHIN:
                faults.before(point, faults.within("made to fail"))

        return real(self, batches, usage, inner)

    return write
