"""Saving the sequences of a store, and what is done when that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvstore.directory import Directory
from kvstore.logs import log, log_event
from kvstore.storage.arrays import encode_arrays
from kvstore.storage.catalog import CatalogEntry, ExtentRef
from kvstore.stored_indexes import StoredIndexes, mark

if TYPE_CHECKING:
    from kvstore.sequence import Sequence
    from kvstore.store import KVStore


class Saver:
    """Writes what is not on disk yet. Work that fails leaves a doubt about what is there; the next work looks first."""

    def __init__(self, store: KVStore, directory: Directory, indexes: StoredIndexes) -> None:
        self._store = store
        self._directory = directory
        self._archive = directory.archive
        self._indexes = indexes
        self._codebook_versions: dict[int, int] = {}
        self._dropped: set[tuple[bytes, int]] = set()  # which the disk may not have heard of yet
        self._torn = False  # work has failed since the catalog was read
        if directory.codebooks_path.exists():
            store.codebooks.load(directory.codebooks_path)
            self._codebook_versions = self._versions()

    def drop(self, name: str, held: Iterable[ExtentRef]) -> None:
        """Forget a sequence on disk that held these extents."""
        entry = self._archive.entries.get(name)
        self.guarded(lambda: self._archive.drop(name, held))
        if entry is not None:
            self._dropped.add((entry.sequence, entry.generation))

    def settle(self) -> None:
        """Clear a doubt that is left, so that a directory which is closed holds nothing without a name."""
        if self._torn:
            self._recover()

    def write(self, sequences: Iterable[Sequence], *, final: bool) -> None:
        """Save sequences that are kept, and the codebooks, and wait until all is written; see `Persistence.flush`."""

        def work() -> None:
            for seq in sequences:
                if seq.keep:
                    self.save(seq, final=final)
            self._save_codebooks()
            with self._store.recorder.span("flush"):
                self._directory.tier.flush()
            self._dropped.clear()

        self.guarded(work)

    def save(self, seq: Sequence, *, final: bool) -> None:
        """Put what is not on disk of a sequence on its way there."""
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
        text = "%(sequence)r is on its way to the disk, %(rows)d rows and %(indexes)d indexes"
        tell(seq, "sequence.saved", text, indexes=len(changed))

    def guarded(self, work: Any) -> None:
        """Do work; after one that failed learn again what is on disk, so that what is not is written."""
        try:
            if self._torn:
                self._recover()
            work()
        except BaseException:  # also memory that ran out in the writer's thread
            self._torn = True
            self._forget_saves()
            raise

    def _recover(self) -> None:
        """Read the catalog, drop again what came back with it, and delete what saves that failed have left."""
        self._archive.read_catalog()
        for name, entry in list(self._archive.entries.items()):
            if (entry.sequence, entry.generation) in self._dropped:
                self._archive.drop(name)
        self._archive.tier.delete_many(self._archive.orphans())
        self._torn = False

    def _forget_saves(self) -> None:
        """Take nothing for saved but extents that blocks of the heap have been given up for; deletes nothing."""
        for seq in self._store._sequences.values():
            self.forget_save(seq)
        self._archive.hold_only(ref for seq in self._store._sequences.values() for ref in seq._saved.extents)

    def forget_save(self, seq: Sequence) -> tuple[ExtentRef, ...]:
        """The same for one sequence; returns the extents that it knows no more."""
        table, known, per_extent = seq._tables[0], seq._saved.extents, self._directory.rows.blocks_per_extent
        last = max((n for n in range(table.n_blocks) if table.extent(n) is not None), default=-1)
        n_extents = -(-(last + 1) // per_extent)
        seq._saved.forget(n_extents, n_extents * per_extent * self._store.schema.block_tokens)
        return known[n_extents:]

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


def tell(seq: Sequence, event: str, text: str, **fields: Any) -> None:
    """Log an event of a sequence."""
    log_event(log, logging.DEBUG, event, text, sequence=seq.name, rows=len(seq), **fields)


def _encode_tokens(seq: Sequence) -> bytes:
    return encode_arrays({"tokens": seq.tokens}, {"owner": seq.owner})
