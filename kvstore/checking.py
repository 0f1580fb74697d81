"""Checking the directory of a store against itself, in both directions, and mending what can be mended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.archive import Archive, tokens_key
from kvstore.errors import CorruptStoreError, UnsupportedFormatError
from kvstore.index_builder import IndexBuilder
from kvstore.index_state import decode_index
from kvstore.row_records import RowRecords
from kvstore.storage.catalog import CatalogEntry, ExtentRef
from kvstore.table import Table


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        kind: "catalog" (an entry), "rows" (lost or damaged), "index" (the same), "tokens" (damaged), or "orphan" (a
            record that no sequence names).
        sequence: name of the sequence, "" for an orphan.
        text: what is wrong, and where.
        remedy: what repair does about it.
    """

    kind: str
    sequence: str
    text: str
    remedy: str


class Checker:
    """Reads every record of a directory once; O(bytes on disk). Nothing is changed unless it repairs."""

    def __init__(self, archive: Archive, rows: RowRecords, builder: IndexBuilder) -> None:
        self._archive = archive
        self._rows = rows
        self._builder = builder

    def check(self, repair: bool) -> list[Finding]:
        """Return what is wrong; with `repair` sequences are cut to their sound rows, the rest is deleted.

        A sequence that loses rows keeps those before them. Lost indexes are built again when it is next used; damaged
        tokens are forgotten.
        """
        found = [
            Finding("catalog", "", f"an entry cannot be read: {why}", "deleted with the rows of its sequence")
            for why in self._archive.damaged.values()
        ]
        if repair and found:
            self._archive.give_up_damaged()
        for entry in list(self._archive.entries.values()):
            n_rows, problems = self._check_rows(entry)
            bad_layers = []
            for layer, problem in self._check_indexes(entry):
                bad_layers.append(layer)
                problems.append(problem)
            lost_tokens = list(self._check_tokens(entry))
            problems += lost_tokens
            found += problems
            if repair and lost_tokens:
                self._archive.tier.delete_many([tokens_key(entry)])
            if repair and problems:
                self._archive.cut(entry, n_rows, bad_layers)
        orphans = self._archive.orphans()
        found += [Finding("orphan", "", f"{key} belongs to no sequence", "deleted") for key in orphans]
        if repair and orphans:
            self._archive.tier.delete_many(orphans)
        if repair:
            self._archive.tier.flush()
        return found

    def sound_rows(self, tables: Sequence[Table], extents: Sequence[ExtentRef]) -> int:
        """Return how many first rows of a sequence in memory can be kept when some of its blocks lie on the disk only.

        Those before the first damaged extent, if blocks that lie behind it are nowhere else. O(extents).
        """
        left = [ref for table in tables for n in range(table.n_blocks) if (ref := table.extent(n)) is not None]
        last = max((ref.number for ref in left), default=-1)
        for ref in extents:
            if ref.number <= last and not all(self._is_sound(layer, ref) for layer in range(len(tables))):
                return ref.number * self._rows.block_tokens
        return tables[0].n_rows

    def _is_sound(self, layer: int, ref: ExtentRef) -> bool:
        try:
            self._rows.read(self._archive.tier, layer, ref)
        except (CorruptStoreError, UnsupportedFormatError):
            return False
        return True

    def _check_rows(self, entry: CatalogEntry) -> tuple[int, list[Finding]]:
        """Return how many first rows are sound in all layers, and what is wrong with the others."""
        n_rows, found = entry.n_rows, []
        for layer, extents in enumerate(entry.layers):
            first = 0
            for ref in extents:
                try:
                    self._rows.read(self._archive.tier, layer, ref)
                except (CorruptStoreError, UnsupportedFormatError) as error:
                    n_rows = min(n_rows, first)
                    found.append(Finding("rows", entry.name, str(error), f"cut to {n_rows} of {entry.n_rows} rows"))
                first += ref.n_tokens
        return n_rows, found

    def _check_tokens(self, entry: CatalogEntry) -> Iterator[Finding]:
        try:
            self._archive.load_tokens(entry)
        except (CorruptStoreError, UnsupportedFormatError) as error:
            yield Finding("tokens", entry.name, str(error), "forgotten; match_prefix will not find the sequence")

    def _check_indexes(self, entry: CatalogEntry) -> Iterator[tuple[int, Finding]]:
        for layer, ref in enumerate(entry.indexes):
            if ref is None or ref.kind != self._builder.config.index.kind:
                continue  # of other settings: it will be built again anyway
            try:
                decode_index(self._archive.load_index(ref, layer), self._builder, layer, ref.first_row)
            except (CorruptStoreError, UnsupportedFormatError) as error:
                yield layer, Finding("index", entry.name, str(error), "built again when the sequence is next used")
