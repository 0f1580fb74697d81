"""Keeps the sequences of a store in its directory: when they are saved, and how one comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore.checking import Checker, Finding
from kvstore.directory import Directory
from kvstore.errors import CorruptStoreError, KVStoreError, ReadOnlyStoreError
from kvstore.last_used import LastUsed
from kvstore.logs import log, log_event
from kvstore.moves import Moves
from kvstore.residency import Residency
from kvstore.room import Room
from kvstore.saver import Saver, tell
from kvstore.sequence import Sequence
from kvstore.spill_pool import SpillPool
from kvstore.spill_reader import SpillReader
from kvstore.stats_file import write_stats
from kvstore.storage.arrays import decode_arrays
from kvstore.storage.catalog import CatalogEntry
from kvstore.stored_indexes import StoredIndexes
from kvstore.tokens import Tokens

if TYPE_CHECKING:
    from kvstore.store import KVStore

DISK_SHARE = 0.95
"""Of the spill's size that rows can fill: LMDB needs pages of its own, and room to write before it deletes."""


class Persistence:
    """The durable side of a store. Everything is called on the store's thread; the disk is written by another."""

    def __init__(self, store: KVStore, directory: Directory) -> None:
        self._store = store
        self._directory = directory
        self._archive = directory.archive
        self._indexes = StoredIndexes(directory.archive, store.indexing)
        self.last_used = LastUsed(directory.path)
        reader = SpillReader(directory.tier, directory.rows, store.recorder)
        self._spill_pool = store._spill_pool = SpillPool(store.schema, store.config, reader, store.workspace)
        self._moves = Moves(store, directory.rows)
        self.residency = Residency(store.heap, store._sequences, self._unload, self._spill)
        if not directory.was_closed and not self.readonly:
            self._archive.tier.delete_many(self._archive.orphans())
        self._saver = Saver(store, directory, self._indexes)

    @property
    def readonly(self) -> bool:
        """Whether the directory is only read."""
        return self._archive.readonly

    @property
    def names(self) -> list[str]:
        """Names of the sequences in the directory."""
        return list(self._archive.entries)

    def room(self, using: Iterable[Sequence]) -> Room:
        """Return how many rows heap and disk have room for while these are in use; see `Room`."""
        schema, config, tier = self._store.schema, self._store.config, self._directory.tier
        busy = {seq.name: seq for seq in (*self.residency.busy(), *using)}
        fixed = sum(map(self._moves.fixed_blocks, busy.values()))
        left_bytes = int(DISK_SHARE * config.spill_bytes) - tier.n_bytes - tier.queued_bytes
        disk_blocks = 0 if self.readonly else max(0, left_bytes) // schema.block_bytes
        return Room.of(schema, self._store.heap.limit_blocks, fixed, disk_blocks)

    def settled_bytes(self) -> int:
        """Return the bytes of the records on disk once all that waits has been written; waits for it."""
        self._saver.guarded(self._directory.tier.flush)
        return self._directory.tier.n_bytes

    def sizes(self) -> dict[str, int]:
        """Return what `StoreStats` says of the disk."""
        tier, residency = self._directory.tier, self.residency
        return {
            "disk_bytes": tier.n_bytes,
            "queued_bytes": tier.queued_bytes,
            "damaged_records": tier.damaged_records,
            "unloads": residency.unloaded,
            "spills": residency.spilled,
        }

    @property
    def last_generation(self) -> int:
        """The highest generation of a stored sequence, -1 when there is none."""
        return max((entry.generation for entry in self._archive.entries.values()), default=-1)

    def rows_of(self, name: str) -> int:
        """Rows of a stored sequence."""
        return self._archive.entries[name].n_rows

    def check_writable(self) -> None:
        """Raise `ReadOnlyStoreError` when the directory is only read."""
        if self.readonly:
            raise ReadOnlyStoreError(f"{self._directory.path} was opened to be read; open it without readonly")

    def committed(self, seq: Sequence) -> None:
        """Send a sequence's rows to the disk when enough have come since the last time."""
        rows = self._store.config.flush_rows
        if rows and seq.keep and len(seq) - seq._saved.n_rows >= rows:
            self._saver.guarded(lambda: self._saver.save(seq, final=False))

    def flush(self, sequences: Iterable[Sequence], *, final: bool = False) -> None:
        """Have all committed rows written, with `final` also every index as it is now; raises `StorageError`."""
        if not self.readonly:
            self._saver.write(sequences, final=final)
            write_stats(self._directory.path, self._store.stats())
            for seq in self._store._sequences.values():
                self.last_used.note(seq.name, seq._used_s)
            self.last_used.write(self.names)

    def checkpoint(self, sequences: Iterable[Sequence]) -> None:
        """`flush` everything and wait until a loss of power cannot take it back."""
        self.check_writable()
        self.flush(sequences, final=True)
        self._saver.guarded(self._directory.tier.sync)

    def drop(self, name: str, seq: Sequence | None) -> None:
        """Forget a sequence on disk, and what its handle knew to be there."""
        self._saver.drop(name, seq._saved.extents if seq is not None and not seq._unloaded else ())
        self.residency.forget(name)

    def hold(self, seq: Sequence) -> None:
        """Keep on disk what a fork shares with the sequence it came from."""
        self._archive.hold(seq._saved.extents)

    def vacuum(self) -> int:
        """Give room that dropped sequences have left back to the system; returns bytes."""
        self.check_writable()
        given = self._directory.tier.vacuum()
        log_event(log, logging.INFO, "store.vacuumed", "%(bytes)d bytes given back", bytes=given)
        return given

    def check(self, repair: bool) -> list[Finding]:
        """Return what is wrong in the directory; with `repair` mend it, from memory where the rows are there."""
        if repair:
            self.check_writable()
        checker = Checker(self._archive, self._directory.rows, self._store.indexing)
        found = checker.check(repair)
        if repair and found:
            self._shorten_handles()
            for seq in self._store._sequences.values():
                seq.truncate(min(len(seq), checker.sound_rows(seq._tables, seq._saved.extents)))
                self._archive.let_go(self._saver.forget_save(seq))
            log_event(log, logging.WARNING, "store.repaired", "%(findings)d findings mended", findings=len(found))
            self.flush(self._store._sequences.values())
        return found

    def load(self, name: str) -> Sequence:
        """Return a stored sequence, its rows in the heap and its indexes ready; raises `HeapFullError` and others.

        It is the one that somebody holds already, if so.
        """
        found = self.residency.handle(name)
        if found is not None:
            self.bring_back(found)
            return found
        entry = self._archive.entries[name]
        seq = Sequence(self._store, name, entry.generation)
        seq._first_row, seq._n_rows = entry.first_row, entry.n_rows
        seq._budget = self._store.config.budget if callable(self._store.config.budget) else entry.budget
        seq._tokens, seq._owner = self._read_tokens(entry)
        seq._last_used = self._store._tick()
        self._fill(seq, entry)
        self.residency.register(seq)
        tell(seq, "sequence.loaded", "%(sequence)r is read, %(rows)d rows")
        return seq

    def bring_back(self, seq: Sequence) -> None:
        """Read the rows and indexes of a sequence that was taken out of memory."""
        self._fill(seq, self._archive.entries[seq.name])
        seq._unloaded = False
        self._store._sequences[seq.name] = seq
        tell(seq, "sequence.loaded", "%(sequence)r is brought back, %(rows)d rows")

    def _fill(self, seq: Sequence, entry: CatalogEntry) -> None:
        """Read a sequence's rows and indexes, or change nothing."""
        if not self.residency.is_used(seq):
            self.residency.use([seq])
        n_layers, n_blocks = self._store.schema.n_layers, -(-entry.n_rows // self._store.schema.block_tokens)
        self.residency.unload_idle(n_layers * n_blocks)
        left = self._moves.left_at_load(entry)
        self._store.heap.prefault(n_layers * (n_blocks - len(left)))
        seq._saved = self._archive.load(entry, seq._tables, left)
        try:
            self._fill_rest(seq, entry)
        except BaseException:
            self._archive.let_go(seq._saved.extents)
            seq._unload()
            raise

    def _fill_rest(self, seq: Sequence, entry: CatalogEntry) -> None:
        if entry.runs:
            seq._positions.offsets, seq._positions.positions = np.array(entry.runs, np.int64).T.copy()
        seq._positions.n_rows = entry.n_rows
        seq._saved.tokens = seq._tokens.version
        seq._saved.marks = [self._indexes.load(seq, layer, ref) for layer, ref in enumerate(entry.indexes)]
        seq._indexes.truncate(entry.n_rows)  # one that was stored before the sequence was cut covers its window
        seq._indexes.advance(seq._tables, seq._positions, seq._first_row)  # the rows that came after, or all

    def _unload(self, seq: Sequence) -> None:
        """Save a sequence and take it out of memory; it stays when it cannot be saved."""
        if not self.readonly:
            self._saver.write([seq], final=True)
        seq._unload()
        self._archive.let_go(seq._saved.extents)
        self._store._prefixes.remove(seq.name)  # its tokens may have changed since they were looked at
        self.last_used.note(seq.name, seq._used_s)
        del self._store._sequences[seq.name]
        tell(seq, "sequence.unloaded", "%(sequence)r is taken out of memory, %(rows)d rows")

    def _spill(self, seq: Sequence, n_blocks: int) -> int:
        """Give up blocks of a sequence that are on the disk, after saving it if need be; returns how many."""
        if seq.keep and not self.readonly:
            self._saver.write([seq], final=False)
        return self._moves.spill(seq, n_blocks)

    def tokens_of(self, name: str) -> tuple[Tokens, str | None]:
        """Return the tokens of a stored sequence and its owner, None for one with padding."""
        entry = self._archive.entries[name]
        tokens, owner = self._read_tokens(entry)
        return tokens, owner if entry.first_row == 0 else None

    def _read_tokens(self, entry: CatalogEntry) -> tuple[Tokens, str]:
        data = self._archive.load_tokens(entry)
        if data is None:
            return Tokens(), ""
        arrays, notes = decode_arrays(data)
        ids, owner = arrays.get("tokens"), notes.get("owner")
        if ids is None or ids.dtype != np.int64 or ids.ndim != 1 or len(ids) > entry.n_rows or type(owner) is not str:
            raise CorruptStoreError(
                f"the tokens of {entry.name!r} are damaged; drop the sequence, or restore the store"
            )
        return Tokens(ids), owner

    def close(self, sequences: Iterable[Sequence]) -> None:
        """Save everything and give the directory up, also where that raises."""
        try:
            self.flush(sequences, final=True)
        finally:
            with suppress(KVStoreError):
                if not self.readonly:
                    self._saver.settle()
            self._spill_pool.close()
            self._directory.close()

    def _shorten_handles(self) -> None:
        """Tell handles of sequences that are not in memory that a repair may have cut them."""
        for name, entry in self._archive.entries.items():
            handle = self.residency.handle(name)
            if handle is not None and handle._unloaded:
                handle._n_rows = entry.n_rows
                handle._tokens.truncate(entry.n_rows)
