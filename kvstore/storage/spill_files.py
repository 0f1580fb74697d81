"""Names of a spill's data files, and moving from one to the next.

The data file has a number; vacuum writes the next one beside it and then removes the old. Were the old name used again,
a process that still reads the old file would share its lock file with the new one, and read garbage.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from kvstore.storage.files import Hook, check_regular, disk_error, sync_folder

_DATA = re.compile(r"spill-(\d{6})\.mdb")
_OURS = re.compile(r"spill-(\d{6})\.mdb(\.new)?(-lock)?")
NEW_SUFFIX = ".new"


def data_path(folder: Path, number: int) -> Path:
    """Return the path of a data file.

    >>> data_path(Path("book.kv"), 3).name
    'spill-000003.mdb'
    """
    return folder / f"spill-{number:06d}.mdb"


def number_of(path: Path) -> int:
    """Return the number in the name of a data file."""
    return int(path.name[6:12])


def lock_path(path: Path) -> Path:
    """Return the path of the lock file that LMDB keeps beside a data file."""
    return path.with_name(path.name + "-lock")


def new_path(path: Path) -> Path:
    """Return where a data file is written before it has its name."""
    return path.with_name(path.name + NEW_SUFFIX)


def find_data(folder: Path) -> Path | None:
    """Return the data file in use, the one with the highest number, or None; a missing folder has none."""
    try:
        names = [name for name in os.listdir(folder) if _DATA.fullmatch(name)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(f"{folder} cannot be read", error) from error
    return folder / max(names) if names else None


def make_room(path: Path) -> Path:
    """Return where to write a data file to be named `path`, with nothing there."""
    part = new_path(path)
    for stale in (part, lock_path(part), lock_path(path)):
        stale.unlink(missing_ok=True)
    return part


def put_in_place(path: Path, hook: Hook) -> None:
    """Give a data file that is whole and on disk its name, for good."""
    part = new_path(path)
    os.rename(part, path)
    hook("spill.renamed")
    sync_folder(path.parent)
    lock_path(part).unlink(missing_ok=True)


def remove_others(path: Path) -> None:
    """Remove what interrupted creations and vacuums have left, all but the data file in use and its lock file."""
    keep = {path.name, lock_path(path).name}
    for name in os.listdir(path.parent):
        if _OURS.fullmatch(name) and name not in keep:
            with suppress(OSError):  # it is in nobody's way, and the next one who opens tries again
                path.with_name(name).unlink()


def check_lock_file(path: Path) -> None:
    """Raise `CorruptStoreError` if LMDB's lock file is a link or no file: LMDB would follow it, and write there."""
    if os.path.lexists(lock_path(path)):
        check_regular(lock_path(path))


def extend(path: Path, n_bytes: int) -> None:
    """Make a file longer; what is added reads as zeros."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(handle, n_bytes)
    finally:
        os.close(handle)
