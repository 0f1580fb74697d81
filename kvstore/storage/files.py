"""Small files that may be torn or hostile: reads with a cap, writes whole or not at all, no link followed."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import CorruptStoreError, ReadOnlyStoreError, StorageError

Hook = Callable[[str], None]
"""Is told the name of a point that the work has reached; tests kill the process there."""


def no_hook(point: str) -> None:
    """Do nothing at a point."""


def check_regular(path: Path) -> int:
    """Return the size of a file in bytes; raises `CorruptStoreError` for a link, a folder, anything but a file."""
    state = os.lstat(path)
    if stat.S_ISLNK(state.st_mode):
        raise CorruptStoreError(f"{path} is a link; a store follows none, put the file itself there")
    if not stat.S_ISREG(state.st_mode):
        raise CorruptStoreError(f"{path} is not a file ({stat.filemode(state.st_mode)}); remove it")
    return state.st_size


def read_capped(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file; raises `CorruptStoreError` for a link, no file, or more than `max_bytes`.

    A file that is not there raises `FileNotFoundError`, one that cannot be read `StorageError`.
    """
    check_regular(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:  # checked again: what lies there may have been replaced
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise CorruptStoreError(f"{path} is not a file; remove it")
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_error(f"{path} cannot be read", error) from error
    if len(data) > max_bytes:
        raise CorruptStoreError(f"{path} is larger than the {max_bytes} bytes that such a file may have")
    return data


def write_atomic(path: Path, data: bytes, hook: Hook = no_hook, *, sync: bool = True) -> None:
    """Replace a file by one with these bytes, on disk when this returns; a crash leaves the old or the new one.

    Without `sync` it is not waited for the disk: the end of the process leaves the old or the new one, a loss of power
    anything. Raises `ReadOnlyStoreError` or `StorageError`, and the old file is as it was.
    """
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    except OSError as error:
        raise disk_error(f"{path} cannot be written", error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        hook("file.written")
        os.replace(part, path)
        hook("file.renamed")
        if sync:
            sync_folder(path.parent)
    except BaseException as error:
        Path(part).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(f"{path} cannot be written", error) from error
        raise


def sync_folder(folder: Path) -> None:
    """Make names that were added to, or taken from, a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_parts(folder: Path, name: str) -> None:
    """Remove what an interrupted `write_atomic` of this file has left."""
    for part in folder.glob(f"{name}.*.part"):
        part.unlink(missing_ok=True)


def disk_error(what: str, error: OSError) -> StorageError | ReadOnlyStoreError:
    """Return the error of this package for one of the system."""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnlyStoreError(f"{what}: {error}; give this user access, or open the store read-only")
    return StorageError(error.errno or 0, f"{what}: {error}; free room or check the disk, then try again")
