"""The spill: a tier on disk, in one LMDB file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import (
    ConfigError,
    CorruptBlockError,
    CorruptStoreError,
    KVStoreError,
    StorageError,
    StoreClosedError,
)
from kvstore.storage.buffers import Buffers
from kvstore.storage.encodings import Buffer
from kvstore.storage.files import Hook, disk_error, no_hook, sync_folder
from kvstore.storage.gate import Gate
from kvstore.storage.key import KEY_BYTES, SEQUENCE_BYTES, RecordKey
from kvstore.storage.lmdb_file import LmdbFile
from kvstore.storage.record import Record, decode_record, encode_record
from kvstore.storage.spill_files import data_path, find_data, lock_path, make_room, number_of, remove_others
from kvstore.storage.spill_settings import SpillSettings
from kvstore.storage.tier import Tier
from kvstore.storage.usage import Usage
from kvstore.storage.write_queue import Batch, Waiting, WriteQueue

TRIES = 3  # of a reader whose file is replaced, by a vacuum, between finding and opening it


class LmdbTier(Tier):
    """Records in an LMDB file, written by a thread of its own, read by any thread and by other processes.

    One process writes: the caller holds the `DirectoryLock`. A reader (`readonly`) sees what is written, at the moment
    of each read, and follows a `vacuum` of the writer. `live` says that a writer has the file open right now, and has
    verified it; a file that nobody writes is verified first. What has not been flushed is lost with the process.

    Attributes:
        folder: where the file lies; made if need be.
        settings: None for a reader.
        store_id: 16 bytes that say which store the file belongs to.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: SpillSettings | None = None,
        *,
        store_id: bytes | None = None,
        readonly: bool = False,
        live: bool = False,
        hook: Hook = no_hook,
    ) -> None:
        """Open or make a spill; raises as `LmdbFile` does, `CorruptStoreError` also for a spill of another store."""
        super().__init__(readonly=readonly)
        if readonly == (settings is not None):
            raise ConfigError("a spill is opened with settings to be written, or readonly and without")
        self.folder = Path(folder)
        self.settings = settings
        self._hook = hook
        self._gate = Gate()
        self._file = self._open_file(store_id, live)
        self.store_id = self._file.store_id
        self._usage = Usage()
        self._queue: WriteQueue | None = None
        try:
            self._prepare(store_id)
        except BaseException:
            self._file.close()
            raise

    def write(self, puts: Iterable[Record] = (), deletes: Iterable[RecordKey] = ()) -> int:
        """Put a copy of the batch into the queue; blocks or raises `SpillFullError` when it is full."""
        self._check_writable()
        queue = self._writer()
        taken = {record.key.pack(): encode_record(record, queue.buffers) for record in puts}
        return queue.put(taken, [key.pack() for key in deletes])

    def get_many(self, keys: Iterable[RecordKey]) -> list[Record | None]:
        """Return records from the queue or the file."""
        self._check_usable()
        try:
            return self._find(list(keys))
        except CorruptBlockError:
            self.damaged_records += 1
            raise

    def _find(self, keys: list[RecordKey]) -> list[Record | None]:
        # The queue first: what is no longer in it when it is asked is in the file by the time that is read.
        if self._queue is None or not self._queue.waiting_bytes:
            return self._read_file(keys)
        packed = [key.pack() for key in keys]
        waiting = self._queue.find(packed)
        if None not in waiting or not any(waiting):
            return self._merged(keys, waiting)
        with self._queue.frozen(packed) as waiting:  # else a batch written meanwhile would be seen in part
            return self._merged(keys, waiting)

    def contains(self, key: RecordKey) -> bool:
        """Whether there is a record under the key, sound or not."""
        self._check_usable()
        packed = key.pack()
        [waiting] = self._queue.find([packed]) if self._queue else [None]
        if waiting is not None:
            return waiting[1] is not None
        with self._open() as file:
            return bool(file.record_keys(packed))

    def iterate(self, prefix: bytes = b"") -> Iterator[RecordKey]:
        """Yield the keys in queue and file."""
        self._check_usable()
        waiting = self._queue.waiting() if self._queue else {}
        with self._open() as file:
            found = set(file.record_keys(prefix))
        for key, is_kept in waiting.items():
            if key.startswith(prefix):
                (found.add if is_kept else found.discard)(key)
        return map(RecordKey.unpack, sorted(found))

    @property
    def n_records(self) -> int:
        """Records in the file."""
        return self._counted().n_records

    @property
    def n_bytes(self) -> int:
        """Bytes of the records in the file."""
        return self._counted().n_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queue.waiting_bytes if self._queue else 0

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        with self._open() as file:
            return file.file_bytes

    @property
    def written(self) -> int:
        """Number of the last batch that is in the file."""
        return self._queue.written if self._queue else 0

    def flush(self) -> None:
        """Wait for the writer."""
        self._check_usable()
        if self._queue:
            self._queue.drain()

    def sync(self) -> None:
        """Wait for the writer, then for the disk."""
        self.flush()
        if not self.readonly:
            with self._open() as file:
                file.sync()

    def vacuum(self) -> int:
        """Move to a compact copy of the file; readers and writers wait meanwhile. Returns the bytes given back."""
        self._check_writable()
        with self._gate.exclusive():
            self._check_writable()
            before = self._file.file_bytes
            path = data_path(self.folder, number_of(self._file.path) + 1)
            try:
                part = make_room(path)
                self._file.copy_to(part)
                self._hook("spill.copied")
                os.rename(part, path)
                self._hook("spill.renamed")
                self._move_to(path)
                sync_folder(self.folder)  # before the old file goes
            except OSError as error:
                if isinstance(error, KVStoreError):
                    raise
                raise disk_error(f"{path} cannot be written", error) from error
            self._hook("spill.moved")
            remove_others(path)
            return before - self._file.file_bytes

    def close(self) -> None:
        """Write what waits, wait for the disk, close; a second call, and one in a forked child, does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            if self._queue:
                self._queue.stop()
        finally:
            with self._gate.exclusive():
                is_first, self._closed = not self._closed, True
                if is_first:
                    self._close_file()

    def _move_to(self, path: Path) -> None:
        """Use a copy in place of the file; a copy that cannot be opened must not be found by the next one who opens."""
        try:
            file = LmdbFile(path, self.settings, verified=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        old, self._file = self._file, file
        old.close()

    def _close_file(self) -> None:
        try:
            if not self.readonly:
                self._file.sync()
        finally:
            self._file.close()

    def _open_file(self, store_id: bytes | None, live: bool) -> LmdbFile:
        if self.settings is None:
            return self._open_to_read(live)
        path = find_data(self.folder)
        if path is None:
            path = data_path(self.folder, 1)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                LmdbFile.create(path, self.settings, store_id or bytes(SEQUENCE_BYTES), self._hook)
            except OSError as error:
                raise disk_error(f"{path} cannot be made", error) from error
        return LmdbFile(path, self.settings)

    def _open_to_read(self, live: bool) -> LmdbFile:
        for _ in range(TRIES):
            path = find_data(self.folder)
            if path is None:
                raise StorageError(f"{self.folder} holds no spill; open it without readonly to make one")
            try:
                return LmdbFile(path, None, verified=live)
            except OSError:
                if os.path.lexists(path):
                    raise
        raise StorageError(f"{self.folder}: its data file was replaced {TRIES} times in a row; try again")

    def _prepare(self, store_id: bytes | None) -> None:
        if store_id is not None and store_id != self.store_id:
            raise CorruptStoreError(
                f"{self._file.path} belongs to store {self.store_id.hex()}, not to {store_id.hex()}; put its own back"
            )
        self._usage = self._file.usage()
        if self.settings is None:
            return
        remove_others(self._file.path)
        self._queue = WriteQueue(
            self._commit,
            Buffers(self.settings.queue_bytes),
            queue_bytes=self.settings.queue_bytes,
            commit_bytes=self.settings.commit_bytes,
            block=self.settings.when_full == "block",
            name="kvstore spill",
        )

    def _writer(self) -> WriteQueue:
        if self._queue is None:
            raise StoreClosedError(f"{self._name()} has no writer; open it again")
        return self._queue

    def _commit(self, batches: Sequence[Batch]) -> None:
        """Write batches; called by the queue's thread only, which so owns every write transaction."""
        with self._gate.shared():
            self._usage = self._file.write(batches, self._usage, self._hook)

    def _merged(self, keys: Sequence[RecordKey], waiting: Sequence[Waiting | None]) -> list[Record | None]:
        both = list(zip(keys, waiting, strict=True))
        rest = iter(self._read_file([key for key, found in both if found is None]))
        return [next(rest) if found is None else _decoded(key, found[1]) for key, found in both]

    def _read_file(self, keys: Sequence[RecordKey]) -> list[Record | None]:
        if not keys:
            return []
        with self._open() as file:
            return file.read(keys)

    @contextmanager
    def _open(self) -> Iterator[LmdbFile]:
        """Hold the file open; a reader whose file was replaced moves to the new one first."""
        self._check_usable()
        if self.readonly and not os.path.lexists(self._file.path):
            self._follow()
        with self._gate.shared():
            self._check_usable()
            yield self._file

    def _follow(self) -> None:
        with self._gate.exclusive():
            self._check_usable()
            if not os.path.lexists(self._file.path) and find_data(self.folder) is not None:
                file = self._open_to_read(live=True)  # the writer that made it vouches
                self._file.close()
                self._file = file

    def _counted(self) -> Usage:
        """Usage of the file: known to the writer, counted by a reader."""
        with self._open() as file:
            return file.usage() if self.readonly else self._usage

    def _check(self) -> None:
        """Assert the invariants: accounting equals a recount, one data file, keys of the right size."""
        self.flush()
        if self._queue:
            self._queue._check()
        with self._open() as file:
            assert self.readonly or self._usage == file.usage()
            assert all(len(key) == KEY_BYTES for key in file.record_keys())
            assert find_data(self.folder) == file.path
            assert not self.readonly or lock_path(file.path).exists()


def _decoded(key: RecordKey, data: Buffer | None) -> Record | None:
    return None if data is None else decode_record(key, data)
