"""One LMDB data file: the only module that knows lmdb, and every guard that its use needs.

LMDB trusts its file: a truncated one kills the process (SIGBUS), a crafted one does worse. So a file is verified, byte
by byte and without LMDB (about 0.1 s a GiB), before LMDB opens it. LMDB has no checksums: records bring their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
from lmdb.verify import VerifyError, verify

from kvstore.errors import (
    CorruptStoreError,
    KVStoreError,
    SpillFullError,
    StorageError,
    StoreLockedError,
)
from kvstore.storage.files import Hook, check_regular, disk_error, no_hook
from kvstore.storage.identity import IDENTITY, identity_of, store_id_in
from kvstore.storage.key import RecordKey
from kvstore.storage.record import Record, decode_record, encode_record
from kvstore.storage.spill_files import check_lock_file, extend, make_room, put_in_place
from kvstore.storage.spill_settings import SpillSettings
from kvstore.storage.usage import Usage, too_full
from kvstore.storage.write_queue import Batch

_IDENTITY_KEY = IDENTITY.pack()
_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


class LmdbFile:
    """An open data file. `write` is called by one thread at a time, the rest by any."""

    def __init__(self, path: Path, settings: SpillSettings | None, *, verified: bool = False) -> None:
        """Open a file that exists; without settings, to read. `verified`: a live writer, or this process, vouches.

        Raises `CorruptStoreError`, `UnsupportedFormatError`, `StoreLockedError`, `ReadOnlyStoreError`, `StorageError`.
        """
        self.path = path
        self._settings = settings
        self._check_file(verified)
        self._env = _open(path, settings)
        try:
            if settings is not None or not verified:
                self._check_length()
            self.store_id = self._read_identity()
        except BaseException:
            self._env.close()
            raise

    @staticmethod
    def create(path: Path, settings: SpillSettings, store_id: bytes, hook: Hook) -> None:
        """Make an empty data file that says whose it is; it appears whole or not at all."""
        part = make_room(path)
        env = _open(part, settings)
        try:
            with _translated(part), env.begin(write=True) as txn:
                txn.put(_IDENTITY_KEY, encode_record(identity_of(store_id)))
            env.sync(True)
        finally:
            env.close()
        hook("spill.created")
        put_in_place(path, hook)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def read(self, keys: Sequence[RecordKey]) -> list[Record | None]:
        """Return a copy of the record under each key, all at one moment."""
        found: list[Record | None] = []
        with self._reading() as txn:
            for key in keys:
                view = txn.get(key.pack())
                # A copy, since the view would outlive its page; checked at once, while it is in the processor's cache.
                found.append(None if view is None else decode_record(key, bytes(view)))
        return found

    def record_keys(self, prefix: bytes = b"") -> list[bytes]:
        """Return the keys of records that begin with prefix, ascending."""
        found = []
        with self._reading() as txn, txn.cursor() as cursor:
            if cursor.set_range(prefix):
                for key in cursor.iternext(keys=True, values=False):
                    if not bytes(key).startswith(prefix):
                        break
                    found.append(bytes(key))
        return [key for key in found if key != _IDENTITY_KEY]

    def usage(self) -> Usage:
        """Count every record; reads no record."""
        usage = Usage()
        with self._reading() as txn, txn.cursor() as cursor:
            for key, value in cursor.iternext():
                if bytes(key) != _IDENTITY_KEY:
                    usage = usage.plus(len(value))
        return usage

    def write(self, batches: Sequence[Batch], usage: Usage, hook: Hook = no_hook) -> Usage:
        """Write batches in one transaction, all or none, and return the usage after it.

        Raises `SpillFullError` when they do not fit, `StorageError` when the disk fails.
        """
        try:
            return self._write_once(batches, usage, hook)
        except lmdb.MapFullError:
            self._free_pages()
        try:
            return self._write_once(batches, usage, hook)
        except lmdb.MapFullError as error:
            why = "no run of free pages is long enough"
            raise SpillFullError(
                too_full(sum(batch.n_bytes for batch in batches), usage, self._writable, why)
            ) from error

    def copy_to(self, part: Path) -> None:
        """Write a compact copy that is on disk when this returns; nothing may lie there."""
        try:
            handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with _translated(self.path):
                    self._env.copyfd(handle, compact=True)
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            part.unlink(missing_ok=True)
            if isinstance(error, KVStoreError):
                raise
            raise disk_error(f"{part} cannot be written", error) from error

    def sync(self) -> None:
        """Wait until all commits are on disk."""
        with _translated(self.path):
            self._env.sync(True)

    def close(self) -> None:
        """Give the file up; the caller sees to it that nobody is inside."""
        try:
            if self._settings is not None:
                self._check_length()  # for readers
        finally:
            self._env.close()

    @property
    def _writable(self) -> SpillSettings:
        assert self._settings is not None
        return self._settings

    def _check_file(self, verified: bool) -> None:
        check_lock_file(self.path)
        if not check_regular(self.path):
            raise CorruptStoreError(f"{self.path} is empty, though never made so; restore it or remove the store")
        if verified:
            return
        try:
            findings = verify(str(self.path), subdir=False)
        except VerifyError as error:
            raise CorruptStoreError(f"{self.path} is no data file that can be read here: {error}") from error
        except OSError as error:
            raise disk_error(f"{self.path} cannot be read", error) from error
        except Exception as error:  # whatever a crafted file makes the verifier do, it is a finding
            findings = [f"{type(error).__name__}: {error}"]
        if findings:
            shown = "; ".join(findings[:3])
            raise CorruptStoreError(f"{self.path} is damaged ({len(findings)} findings): {shown}; restore or remove it")

    def _check_length(self) -> None:
        """See to it that each page that a record may lie on can be read: the verifier looks at its first page only.

        A file may end before its last page, if that was free when it was last written. Made longer, it reads as zeros
        there, and a record that has lost its end fails by its checksum instead of killing the process.
        """
        size, needed = self.file_bytes, (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if size >= needed:
            return
        if self._settings is None:
            raise CorruptStoreError(
                f"{self.path} has {size} bytes, its pages {needed}: it was cut off, or its writer was killed; "
                f"open it once to write, then it can be read"
            )
        extend(self.path, needed)

    def _read_identity(self) -> bytes:
        try:
            [record] = self.read([IDENTITY])
        except CorruptStoreError:
            record = None
        return store_id_in(record, self.path)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with _translated(self.path):
            try:
                txn = self._env.begin(buffers=True)
            except lmdb.ReadersFullError:
                self._env.reader_check()  # those that were killed have not left
                txn = self._env.begin(buffers=True)
            with txn:
                yield txn

    def _write_once(self, batches: Sequence[Batch], usage: Usage, hook: Hook) -> Usage:
        before, wanted = usage, sum(batch.n_bytes for batch in batches)
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                for batch in batches:
                    usage = _apply(txn, batch, usage, hook)
                if usage.page_bytes > self._writable.capacity_bytes and usage.page_bytes > before.page_bytes:
                    raise SpillFullError(too_full(wanted, before, self._writable, "spill_bytes is reached"))
                hook("spill.before_commit")
            hook("spill.committed")
        except lmdb.MapFullError:
            raise
        except lmdb.Error as error:
            raise self._refused(wanted, error) from error
        return usage

    def _free_pages(self) -> None:
        """Make pages that were given up usable: killed readers hold on to them, and so do the last two commits."""
        self._env.reader_check()
        with suppress(lmdb.Error):  # the caller tries again, and hears what is wrong
            for _ in range(2):
                with self._env.begin(write=True) as txn:
                    txn.put(_IDENTITY_KEY, txn.get(_IDENTITY_KEY) or b"")

    def _refused(self, wanted: int, error: lmdb.Error) -> KVStoreError:
        """Return the error for a transaction that failed: LMDB says "input/output error" for a full disk too."""
        state = os.statvfs(self.path)
        free = state.f_bavail * state.f_frsize
        if free <= 2 * wanted:
            return SpillFullError(
                f"{self.path}: {wanted} bytes could not be written, the disk has {free} free ({error}); free some"
            )
        return _as_ours(self.path, error)


def _apply(txn: Any, batch: Batch, usage: Usage, hook: Hook) -> Usage:
    for key in batch.deletes:
        old = txn.get(key)
        if old is not None:
            usage = usage.minus(len(old))
            txn.delete(key)
    for key, data in batch.puts.items():
        old = txn.get(key)
        usage = usage if old is None else usage.minus(len(old))
        usage = usage.plus(len(data))
        txn.put(key, data)
        hook("spill.put")
    return usage


def _open(path: Path, settings: SpillSettings | None) -> lmdb.Environment:
    """Open LMDB; a reader takes the size of the map from the file."""
    power = settings is not None and settings.durability == "power"
    options: dict[str, Any] = (
        {"readonly": True, "map_size": 0} if settings is None else {"map_size": settings.map_bytes}
    )
    with _translated(path):
        env = lmdb.open(
            str(path),
            subdir=False,
            max_dbs=0,
            create=settings is not None,
            sync=power,
            metasync=power,
            writemap=False,  # with it a full disk is a SIGBUS
            mode=0o600,
            max_readers=126 if settings is None else settings.max_readers,
            **options,
        )
        env.reader_check()
        return env


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise errors of this package for those of LMDB."""
    try:
        yield
    except lmdb.Error as error:
        raise _as_ours(path, error) from error


def _as_ours(path: Path, error: lmdb.Error) -> KVStoreError:
    if isinstance(error, _DAMAGED):
        return CorruptStoreError(f"{path} is damaged: {error}; restore it or remove the store")
    if "already open in this process" in str(error):
        return StoreLockedError(f"{path} is open in this process already; use that store, or close it first")
    if isinstance(error, lmdb.ReadersFullError):
        return StorageError(f"{path} has as many readers as max_readers allows ({error}); close some or raise it")
    return StorageError(f"{path}: {error}; check the disk and this user's rights, then open the store again")
