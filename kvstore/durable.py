"""The part of a store's API that has to do with its directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from kvstore.checking import Finding
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, SequenceNotFoundError, StepError
from kvstore.eviction import evict
from kvstore.heap import Heap
from kvstore.locking import StoreLock, locked
from kvstore.room import Room
from kvstore.schema import Schema

if TYPE_CHECKING:
    from kvstore.persistence import Persistence
    from kvstore.sequence import Sequence
    from kvstore.store import KVStore


class Durable:
    """What `KVStore` does with a directory; mixed into it. Without one, in memory, there is little to do."""

    _lock: StoreLock
    schema: Schema
    heap: Heap
    _persistence: Persistence | None
    _sequences: dict[str, Sequence]
    _generation: int

    if TYPE_CHECKING:

        def __init__(self, schema: Schema, config: StoreConfig | None = None) -> None: ...

        def _check_open(self) -> None: ...

        def _check(self) -> None: ...

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        schema: Schema | None = None,
        config: StoreConfig | None = None,
        *,
        readonly: bool = False,
        salvage: bool = False,
    ) -> Self:
        """Open the store in a directory, or make one; sequences are read when they are first asked for.

        Schema and settings may be left out where there is a store already: it is opened as it was last. One process
        writes; others may open it `readonly`. `salvage` opens it also where entries of the catalog are damaged: their
        sequences are missing, and `check(repair=True)` deletes what is left of them.
        Raises `StoreLockedError`, `SchemaMismatchError`, `StorageError`, `CorruptStoreError`, `UnsupportedFormatError`.
        """
        from kvstore.directory import Directory
        from kvstore.persistence import Persistence

        directory = Directory(Path(path), schema, config, readonly=readonly, salvage=salvage)
        try:
            store = cls(directory.schema, directory.config)
            store._persistence = Persistence(cast("KVStore", store), directory)
        except BaseException:
            directory.close()
            raise
        store._generation = store._persistence.last_generation + 1
        return store

    @locked
    def flush(self) -> None:
        """Have all committed rows in the directory when this returns; does nothing in memory.

        They survive the end of the process then, however it comes. Raises `SpillFullError` or `StorageError`; nothing
        is lost in memory, and what was on disk before stays.
        """
        self._check_open()
        if self._persistence is not None:
            self._persistence.flush(self._sequences.values())

    @locked
    def checkpoint(self) -> None:
        """`flush`, with every index as it is now, and wait until a loss of power cannot take it back."""
        self._check_open()
        if self._persistence is not None:
            self._persistence.checkpoint(self._sequences.values())

    @locked
    def check(self, *, repair: bool = False) -> list[Finding]:
        """Compare memory and directory with themselves and each other; returns what is wrong, nothing if all is well.

        With `repair` lost and damaged records are written again from memory where the sequence is there; else it is cut
        to its sound rows; indexes are built again, and records that no sequence names are deleted. O(bytes on disk).
        """
        self._check_open()
        found = []
        try:
            self._check()
        except AssertionError as error:
            found.append(Finding("memory", "", f"the books do not balance: {error}", "open the store again"))
        if self._persistence is not None:
            if not self._persistence.readonly:
                self.flush()
            found += self._persistence.check(repair)
        return found

    @locked
    def unload(self, name: str) -> None:
        """Take a sequence out of memory; it comes back when it is used. Does nothing when it is not in memory.

        A full heap does so by itself with what was used longest ago. Raises `ConfigError` for a sequence that is not
        kept on disk, `StepError` while a step is open and
        `StorageError` when the sequence cannot be saved; it stays in memory then.
        """
        self._check_open()
        seq = self._sequences.get(name)
        if self._persistence is None:
            raise ConfigError("a store in memory has no place for a sequence but memory; use KVStore.open")
        if seq is None:
            if name not in self._persistence.names:
                raise SequenceNotFoundError(f"no sequence is named {name!r}")
            return
        if not seq.keep:
            raise ConfigError(f"{name!r} was created with keep=False; it has no place but memory")
        if seq.step_open:
            raise StepError(f"a step of {name!r} is open; commit it or abort it before unload()")
        self._persistence.residency.unload(seq)

    @locked
    def room(self, using: Iterable[Sequence] = ()) -> Room:
        """Return how many rows there is room for; an estimate, a few per cent on the safe side.

        A prompt of more than `step_rows` comes in several steps; a request of more than `rows` should wait. `using` are
        sequences that go on meanwhile: idle ones can leave the heap whole. O(sequences * layers).
        """
        self._check_open()
        if self._persistence is not None:
            return self._persistence.room(using)
        return Room.of(self.schema, self.heap.limit_blocks, self.heap.used_blocks, None)

    @locked
    def evict(self, *, max_bytes: int | None = None, idle_s: float | None = None) -> list[str]:
        """Drop sequences for good that were not used for idle_s seconds, and more, those used longest ago first, until
        the records take max_bytes at most (the heap, for a store in memory); returns their names.

        Sequences in the middle of a step stay, and those that are not kept. `vacuum` gives the room back to the system.
        """
        self._check_writable()
        return evict(cast("KVStore", self), max_bytes, idle_s)

    @locked
    def vacuum(self) -> int:
        """Give the disk the room back that dropped sequences have left; returns bytes."""
        self._check_writable()
        return self._persistence.vacuum() if self._persistence is not None else 0

    def _committed(self, seq: Sequence) -> None:
        """Called by a sequence whose step has committed."""
        if self._persistence is not None:
            self._persistence.committed(seq)

    def _forked(self, twin: Sequence) -> None:
        """Called for a sequence that has come to know what another one has on the disk."""
        if self._persistence is not None:
            self._persistence.hold(twin)

    def _bring_back(self, seq: Sequence) -> None:
        """Called by a sequence that was taken out of memory and is used."""
        assert self._persistence is not None
        self._persistence.bring_back(seq)

    def _check_writable(self) -> None:
        self._check_open()
        if self._persistence is not None:
            self._persistence.check_writable()
