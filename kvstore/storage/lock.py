"""The lock on a store's directory: one writer at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.errors import KVStoreError, StoreLockedError
from kvstore.storage.files import check_regular, disk_error

LOCK_NAME = "writer.lock"
MAX_LOCK_BYTES = 4096
TRIES = 5  # `holder_of` takes the lock for an instant
PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Holder:
    """Who has a directory: process, host, and since when (ISO 8601, UTC)."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


UNKNOWN = Holder(0, "an unknown host", "an unknown time")


class DirectoryLock:
    """Held from `acquire` to `release`, or to the end of the process: the system takes it back, whatever happens.

    The file stays when the lock is given up; it says who had it last. A child forked by the holder has the lock too, as
    long as it lives. Not for network file systems.
    """

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / LOCK_NAME
        self._handle: int | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether this object has the lock, in this process."""
        return self._handle is not None and self._pid == os.getpid()

    def acquire(self) -> None:
        """Take the lock; raises `StoreLockedError`, naming who has it, or `ReadOnlyStoreError`, `StorageError`."""
        if self.held:
            return
        handle = _open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            if not _try_lock(handle, TRIES):
                raise StoreLockedError(_taken(self.path, _read_holder(handle)))
            if not _is_at(handle, self.path):
                raise StoreLockedError(f"{self.path} was replaced while it was locked; try again")
            _write_holder(handle)
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError) and not isinstance(error, KVStoreError):
                raise disk_error(f"{self.path} cannot be locked", error) from error
            raise
        self._handle, self._pid = handle, os.getpid()

    def release(self) -> None:
        """Give the lock up; does nothing where it is not held."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._pid == os.getpid():  # a forked child must not unlock for its parent
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def holder_of(folder: Path | str) -> Holder | None:
    """Return who has a directory open to write, or None when nobody has."""
    path = Path(folder) / LOCK_NAME
    if not os.path.lexists(path):
        return None
    handle = _open(path, os.O_RDONLY)
    try:
        return None if _try_lock(handle, 1, fcntl.LOCK_SH) else _read_holder(handle)
    finally:
        os.close(handle)  # gives the lock up as well


def _open(path: Path, flags: int) -> int:
    if os.path.lexists(path):
        check_regular(path)
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise disk_error(f"{path} cannot be opened", error) from error


def _try_lock(handle: int, tries: int, how: int = fcntl.LOCK_EX) -> bool:
    for attempt in range(tries):
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < tries:
                time.sleep(PAUSE_SECONDS)
    return False


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is the one that lies at path: it may have been deleted and made anew."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    data = json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), since))).encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, data, 0)


def _read_holder(handle: int) -> Holder:
    """Return who the file names; another process may be about to write it, so anything may be there."""
    try:
        data = json.loads(os.pread(handle, MAX_LOCK_BYTES, 0))
        pid, host, since = data["pid"], data["host"], data["since"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return UNKNOWN
    good = type(pid) is int and isinstance(host, str) and isinstance(since, str)
    return Holder(pid, host[:255], since[:40]) if good else UNKNOWN


def _taken(path: Path, holder: Holder) -> str:
    ended = holder.host == socket.gethostname() and not _is_alive(holder.pid)
    hint = "it has ended, but a child that it forked lives on; end that" if ended else "close it there, or only read"
    return f"{path.parent} is open to write in {holder}: {hint}"


def _is_alive(pid: int) -> bool:
    if not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
