"""Keeps the sequences of a store in its directory: when they are saved, and how one comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.checking import Checker, Finding
from kvstore.directory import Directory
from kvstore.errors import CorruptStoreError, ReadOnlyStoreError, StorageError
from kvstore.index_state import VERSION, decode_index, encode_index
from kvstore.logs import log, log_event
from kvstore.residency import Residency
from kvstore.saved import Saved
from kvstore.sequence import Sequence
from kvstore.stats_file import write_stats
from kvstore.storage.arrays import decode_arrays, encode_arrays
from kvstore.storage.catalog import CatalogEntry, IndexRef
from kvstore.tokens import Tokens

if TYPE_CHECKING:
    from kvstore.store import KVStore

GROWTH = 8
"""An index that was only added to is stored again once it has grown by an eighth: rows after it are coded when the
store is opened."""


class Persistence:
    """The durable side of a store. Everything is called on the store's thread; the disk is written by another."""

    def __init__(self, store: KVStore, directory: Directory) -> None:
        self._store = store
        self._directory = directory
        self._archive = directory.archive
        self._codebook_versions: dict[int, int] = {}
        self.residency = Residency(store.heap, store._sequences, self._unload)
        if not directory.was_closed and not self.readonly:
            self._archive.tier.delete_many(self._archive.orphans())
        if directory.codebooks_path.exists():
            store.codebooks.load(directory.codebooks_path)
            self._codebook_versions = self._versions()

    @property
    def readonly(self) -> bool:
        """Whether the directory is only read."""
        return self._archive.readonly

    @property
    def names(self) -> list[str]:
        """Names of the sequences in the directory."""
        return list(self._archive.entries)

    @property
    def n_bytes(self) -> int:
        """Bytes of the records on disk."""
        return self._directory.tier.n_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes of records that wait to be written."""
        return self._directory.tier.queued_bytes

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
            self._guarded(lambda: self._save(seq, final=False))

    def flush(self, sequences: Iterable[Sequence], *, final: bool = False) -> None:
        """Have all committed rows written, with `final` also every index as it is now; raises `StorageError`."""
        if not self.readonly:
            self._write(sequences, final=final)
            write_stats(self._directory.path, self._store.stats())

    def checkpoint(self, sequences: Iterable[Sequence]) -> None:
        """`flush` everything and wait until a loss of power cannot take it back."""
        self.check_writable()
        self.flush(sequences, final=True)
        self._guarded(self._directory.tier.sync)

    def drop(self, name: str) -> None:
        """Forget a sequence on disk."""
        self.residency.forget(name)
        self._guarded(lambda: self._archive.drop(name))

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
            for seq in self._store._sequences.values():
                seq._saved = Saved(seq._saved.sequence)
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
        _tell(seq, "sequence.loaded", "%(sequence)r is read, %(rows)d rows")
        return seq

    def bring_back(self, seq: Sequence) -> None:
        """Read the rows and indexes of a sequence that was taken out of memory."""
        self._fill(seq, self._archive.entries[seq.name])
        seq._unloaded = False
        self._store._sequences[seq.name] = seq
        _tell(seq, "sequence.loaded", "%(sequence)r is brought back, %(rows)d rows")

    def _fill(self, seq: Sequence, entry: CatalogEntry) -> None:
        if not self.residency.is_used(seq):
            self.residency.use([seq])
        seq._saved = self._archive.load(entry, seq._tables)
        if entry.runs:
            seq._positions.offsets, seq._positions.positions = np.array(entry.runs, np.int64).T.copy()
        seq._positions.n_rows = entry.n_rows
        seq._saved.tokens = seq._tokens.version
        seq._saved.marks = [self._load_index(seq, layer, ref) for layer, ref in enumerate(entry.indexes)]
        seq._indexes.advance(seq._tables, seq._positions, seq._first_row)  # the rows that came after, or all

    def _unload(self, seq: Sequence) -> None:
        """Save a sequence and take it out of memory; it stays when it cannot be saved."""
        if not self.readonly:
            self._write([seq], final=True)
        seq._unload()
        del self._store._sequences[seq.name]
        _tell(seq, "sequence.unloaded", "%(sequence)r is taken out of memory, %(rows)d rows")

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
            self._directory.close()

    def _load_index(self, seq: Sequence, layer: int, ref: IndexRef | None) -> tuple[int, int]:
        if ref is None:
            return 0, 0
        try:
            if ref.version != VERSION or ref.kind != self._store.config.index.kind:
                raise CorruptStoreError(f"it is of kind {ref.kind!r}, version {ref.version}")
            built = decode_index(self._archive.load_index(ref, layer), self._store.indexing, layer, ref.first_row)
            seq._indexes[layer].restore(built)
            return 0, built.index.n_rows
        except CorruptStoreError as error:  # rows are there, so an index can be made again
            what = {"sequence": seq.name, "layer": layer, "reason": str(error)}
            text = "the index of layer %(layer)d of %(sequence)r is built again: %(reason)s"
            log_event(log, logging.WARNING, "index.rebuilt", text, **what)
            seq._saved.indexes[layer] = None
            return 0, 0

    def _write(self, sequences: Iterable[Sequence], *, final: bool) -> None:
        def work() -> None:
            for seq in sequences:
                if seq.keep:
                    self._save(seq, final=final)
            self._save_codebooks()
            self._directory.tier.flush()

        self._guarded(work)

    def _save(self, seq: Sequence, *, final: bool) -> None:
        self.check_writable()
        saved = seq._saved
        if not saved.indexes:
            saved.indexes, saved.marks = [None] * len(seq._tables), [(0, 0)] * len(seq._tables)
        changed = list(self._changed_indexes(seq, final))
        budget, stored = self._plain_budget(seq), self._archive.entries.get(seq.name)
        same_rows = saved.n_rows == saved.valid_rows == len(seq) and saved.tokens == seq._tokens.version
        if same_rows and not changed and stored is not None and stored.budget == budget:
            return
        runs = tuple(zip(seq._positions.offsets.tolist(), seq._positions.positions.tolist(), strict=True))
        entry = CatalogEntry(seq.name, saved.sequence, seq.generation, len(seq), seq.first_row, budget, runs, (), ())
        tokens = None if saved.tokens == seq._tokens.version else _encode_tokens(seq)
        self._archive.save(entry, saved, seq._tables, changed, tokens)
        saved.tokens = seq._tokens.version
        for layer, _, _ in changed:
            saved.marks[layer] = _mark(seq, layer)
        text = "%(sequence)r is on its way to the disk, %(rows)d rows and %(indexes)d indexes"
        _tell(seq, "sequence.saved", text, indexes=len(changed))

    def _changed_indexes(self, seq: Sequence, final: bool) -> Iterator[tuple[int, bytes, IndexRef]]:
        """Yield indexes to store: those trained anew, those that have grown, with `final` all that differ."""
        for layer, keeper in enumerate(seq._indexes):
            index, (builds, rows) = keeper.index, seq._saved.marks[layer]
            if index is None or index.n_rows == 0:
                continue
            is_there = seq._saved.indexes[layer] is not None and builds == keeper.n_builds
            if is_there and (index.n_rows == rows or (not final and index.n_rows < rows * (1 + 1 / GROWTH))):
                continue
            data = encode_index(keeper, self._store.indexing, layer)
            if data is not None:
                kind = self._store.config.index.kind
                yield layer, data, IndexRef(b"", 0, kind, VERSION, 1, index.first_row, index.stop_row)

    def _plain_budget(self, seq: Sequence) -> Any:
        """The budget as the catalog can keep it: a rule cannot be stored, the configured budget stands for it."""
        default = self._store.config.budget
        return seq.budget if not callable(seq.budget) else (None if callable(default) else default)

    def _save_codebooks(self) -> None:
        if self._versions() != self._codebook_versions:
            self._store.codebooks.save(self._directory.codebooks_path)
            self._codebook_versions = self._versions()

    def _versions(self) -> dict[int, int]:
        found = {layer: self._store.codebooks.get(layer) for layer in self._store.codebooks}
        return {layer: entry.version for layer, entry in found.items() if entry is not None}

    def _guarded(self, work: Any) -> None:
        """Do work; after a failed write learn again what is on disk, so that the next save writes what is not."""
        try:
            work()
        except StorageError:
            self._archive.read_catalog()
            for seq in self._store._sequences.values():
                seq._saved = Saved(seq._saved.sequence)
            raise


def _tell(seq: Sequence, event: str, text: str, **fields: Any) -> None:
    log_event(log, logging.DEBUG, event, text, sequence=seq.name, rows=len(seq), **fields)


def _encode_tokens(seq: Sequence) -> bytes:
    return encode_arrays({"tokens": seq.tokens}, {"owner": seq.owner})


def _mark(seq: Sequence, layer: int) -> tuple[int, int]:
    keeper = seq._indexes[layer]
    return keeper.n_builds, keeper.index.n_rows if keeper.index is not None else 0
