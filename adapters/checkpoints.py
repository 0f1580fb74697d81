"""Converted checkpoints on disk, each whole or absent, whatever kills the process that writes it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kvstore.adapters.model_source import ModelFileError

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 22


def cache_dir() -> Path:
    """Directory of converted checkpoints: in `$KVSTORE_CACHE`, else in the user's cache directory."""
    if chosen := os.environ.get("KVSTORE_CACHE"):
        return Path(chosen).expanduser() / "models"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvstore" / "models"


def digest(file: Path) -> str:
    """128-bit xxh3 of a file's content, as hexadecimal."""
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


class CheckpointCache:
    """Checkpoints by key, made once.

    A checkpoint is written in a directory of its own and gets its final name only when it is whole, with a
    manifest of every file's digest. `get` checks the digests, so that a damaged checkpoint is made again and
    never loaded.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str, make: Callable[[Path], None]) -> Path:
        """The checkpoint's directory; calls `make(directory)` first when there is no whole one.

        Raises `ModelFileError` when the cache directory cannot be written.
        """
        target = self.root / key
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(key):
                if not _is_whole(target):
                    self._replace(target, make)
        except OSError as error:
            raise ModelFileError(
                f"cannot keep the converted model in {self.root} ({error}); "
                "set KVSTORE_CACHE to a directory with room for it"
            ) from error
        return target

    def _replace(self, target: Path, make: Callable[[Path], None]) -> None:
        draft = target.with_name(target.name + ".draft")
        for leftover in (draft, target):
            if leftover.exists():
                shutil.rmtree(leftover)
        draft.mkdir()
        try:
            make(draft)
            _write_manifest(draft)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # a second process waits here for the first one's checkpoint; the lock ends with the process that holds it
        with (self.root / f"{key}.lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _write_manifest(directory: Path) -> None:
    files = {file.name: digest(file) for file in sorted(directory.iterdir())}
    for name in files:  # on disk before the rename that makes them count
        with (directory / name).open("rb") as stream:
            os.fsync(stream.fileno())
    (directory / MANIFEST).write_text(json.dumps(files, indent=1))


def _is_whole(directory: Path) -> bool:
    try:
        files = json.loads((directory / MANIFEST).read_text())
        return bool(files) and all(digest(directory / name) == value for name, value in files.items())
    except (OSError, ValueError, AttributeError):  # absent, or a manifest that is no such table
        return False
