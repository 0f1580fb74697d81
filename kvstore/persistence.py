"""Keeps the sequences of a store in its directory: when they are saved, and how one comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.checking import Checker, Finding
from kvstore.directory import Directory
from kvstore.errors import CorruptStoreError, ReadOnlyStoreError
from kvstore.moves import Moves
from kvstore.residency import Residency
from kvstore.room import Room
from kvstore.sequence import Sequence
from kvstore.spill_pool import SpillPool
from kvstore.spill_reader import SpillReader
from kvstore.storage.arrays import decode_arrays, encode_arrays
from kvstore.storage.catalog import CatalogEntry, ExtentRef
from kvstore.stored_indexes import StoredIndexes, mark
from kvstore.tokens import Tokens

if TYPE_CHECKING:
    from kvstore.store import KVStore

DISK_SHARE = 0.95
"""Of the spill's size that rows can fill: LMDB needs pages of its own, and room to write before it deletes."""

log = logging.getLogger("kvstore")


class Persistence:
    """The durable side of a store. Everything is called on the store's thread; the disk is written by another."""

    def __init__(self, store: KVStore, directory: Directory) -> None:
        self._store = store
        self._directory = directory
        self._archive = directory.archive
        self._indexes = StoredIndexes(directory.archive, store.indexing)
        self._codebook_versions: dict[int, int] = {}
        reader = SpillReader(directory.tier, directory.rows, store.recorder)
        self._spill_pool = store._spill_pool = SpillPool(store.schema, store.config, reader, store.workspace)
        self._moves = Moves(store, directory.rows)
        self.residency = Residency(store.heap, store._sequences, self._unload, self._spill)
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

    def room(self, using: Iterable[Sequence]) -> Room:
        """Return how many rows heap and disk have room for while these are in use; see `Room`."""
        schema, config, tier = self._store.schema, self._store.config, self._directory.tier
        busy = {seq.name: seq for seq in (*self.residency.busy(), *using)}
        fixed = sum(map(self._moves.fixed_blocks, busy.values()))
        left_bytes = int(DISK_SHARE * config.spill_bytes) - tier.n_bytes - tier.queued_bytes
        disk_blocks = 0 if self.readonly else max(0, left_bytes) // schema.block_bytes
        return Room.of(schema, self._store.heap.limit_blocks, fixed, disk_blocks)

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
            self._guarded(lambda: self._save(seq, final=False))

    def flush(self, sequences: Iterable[Sequence], *, final: bool = False) -> None:
        """Have all committed rows written, with `final` also every index as it is now; raises `StorageError`."""
        if self.readonly:
            return

        def work() -> None:
            for seq in sequences:
                if seq.keep:
                    self._save(seq, final=final)
            self._save_codebooks()
            with self._store.recorder.span("flush"):
                self._directory.tier.flush()

        self._guarded(work)

    def checkpoint(self, sequences: Iterable[Sequence]) -> None:
        """`flush` everything and wait until a loss of power cannot take it back."""
        self.check_writable()
        self.flush(sequences, final=True)
        self._guarded(self._directory.tier.sync)

    def drop(self, name: str, seq: Sequence | None) -> None:
        """Forget a sequence on disk, and what its handle knew to be there."""
        self.residency.forget(name)
        held = seq._saved.extents if seq is not None and not seq._unloaded else ()
        self._guarded(lambda: self._archive.drop(name, held))

    def hold(self, seq: Sequence) -> None:
        """Keep on disk what a fork shares with the sequence it came from."""
        self._archive.hold(seq._saved.extents)

    def vacuum(self) -> int:
        """Give room that dropped sequences have left back to the system; returns bytes."""
        self.check_writable()
        return self._directory.tier.vacuum()

    def check(self, repair: bool) -> list[Finding]:
        """Return what is wrong in the directory; with `repair` mend it, from memory where the rows are there."""
        if repair:
            self.check_writable()
        checker = Checker(self._archive, self._directory.rows, self._store.indexing)
        found = checker.check(repair)
        if repair and found:
            for seq in self._store._sequences.values():
                seq.truncate(min(len(seq), checker.sound_rows(seq._tables, seq._saved.extents)))
                self._archive.let_go(self._forget_save(seq))
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
        return seq

    def bring_back(self, seq: Sequence) -> None:
        """Read the rows and indexes of a sequence that was taken out of memory."""
        self._fill(seq, self._archive.entries[seq.name])
        seq._unloaded = False
        self._store._sequences[seq.name] = seq

    def _fill(self, seq: Sequence, entry: CatalogEntry) -> None:
        """Read a sequence's rows and indexes, or change nothing."""
        if not self.residency.is_used(seq):
            self.residency.use([seq])
        self.residency.unload_idle(self._store.schema.n_layers * -(-entry.n_rows // self._store.schema.block_tokens))
        seq._saved = self._archive.load(entry, seq._tables, self._moves.left_at_load(entry))
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
        seq._indexes.advance(seq._tables, seq._positions, seq._first_row)  # the rows that came after, or all

    def _unload(self, seq: Sequence) -> None:
        """Save a sequence and take it out of memory; it stays when it cannot be saved."""
        if not self.readonly:
            self.flush([seq], final=True)
        seq._unload()
        self._archive.let_go(seq._saved.extents)
        del self._store._sequences[seq.name]

    def _spill(self, seq: Sequence, n_blocks: int) -> int:
        """Give up blocks of a sequence that are on the disk, after saving it if need be; returns how many."""
        if seq.keep and not self.readonly:
            self.flush([seq])
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
            self._spill_pool.close()
            self._directory.close()

    def _save(self, seq: Sequence, *, final: bool) -> None:
        self.check_writable()
        if final:
            seq._indexes.settle()
        saved = seq._saved
        if not saved.indexes:
            saved.indexes, saved.marks = [None] * len(seq._tables), [(0, 0)] * len(seq._tables)
        changed = list(self._indexes.changed(seq, final))
        budget, stored = self._plain_budget(seq), self._archive.entries.get(seq.name)
        same_rows = saved.n_rows == saved.valid_rows == len(seq) and saved.tokens == seq._tokens.version
        if same_rows and not changed and stored is not None and stored.budget == budget:
            return
        runs = tuple(zip(seq._positions.offsets.tolist(), seq._positions.positions.tolist(), strict=True))
        entry = CatalogEntry(seq.name, saved.sequence, seq.generation, len(seq), seq.first_row, budget, runs, (), ())
        tokens = None if saved.tokens == seq._tokens.version else _encode_tokens(seq)
        with self._store.recorder.span("save"):
            self._archive.save(entry, saved, seq._tables, changed, tokens)
        saved.tokens = seq._tokens.version
        for layer, _, _ in changed:
            saved.marks[layer] = mark(seq, layer)

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
        except BaseException:
            self._archive.read_catalog()
            self._forget_saves()
            raise

    def _forget_saves(self) -> None:
        """Take nothing for saved but extents that blocks of the heap have been given up for; deletes nothing."""
        for seq in self._store._sequences.values():
            self._forget_save(seq)
        self._archive.hold_only(ref for seq in self._store._sequences.values() for ref in seq._saved.extents)

    def _forget_save(self, seq: Sequence) -> tuple[ExtentRef, ...]:
        """The same for one sequence; returns the extents that it knows no more."""
        table, known, per_extent = seq._tables[0], seq._saved.extents, self._directory.rows.blocks_per_extent
        last = max((n for n in range(table.n_blocks) if table.extent(n) is not None), default=-1)
        n_extents = -(-(last + 1) // per_extent)
        seq._saved.forget(n_extents, n_extents * per_extent * self._store.schema.block_tokens)
        return known[n_extents:]


def _encode_tokens(seq: Sequence) -> bytes:
    return encode_arrays({"tokens": seq.tokens}, {"owner": seq.owner})
