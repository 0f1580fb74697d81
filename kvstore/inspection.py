"""What lies in the directory of a store, without reading any rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.directory import Directory
from kvstore.row_records import RowRecords
from kvstore.schema import Schema
from kvstore.storage.key import Kind

if TYPE_CHECKING:
    from kvstore.storage.catalog import CatalogEntry


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """A sequence on disk.

    Attributes:
        name, rows, budget: as of the sequence.
        row_bytes: of its rows as they are in memory; those it shares with others included.
        shared_rows: rows in records that another sequence names too.
        indexed_rows: rows that stored indexes cover, mean over layers; index: kind, "" for none.
    """

    name: str
    rows: int
    budget: float | int | None
    row_bytes: int
    shared_rows: int
    indexed_rows: float
    index: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """A directory at one moment.

    Attributes:
        path, schema: which store it is.
        sequences: in it, by name.
        record_bytes, file_bytes: of all records, and of the file that holds them.
        records: how many of each kind.
        is_open: who has it open to write, None when nobody has.
    """

    path: str
    schema: Schema
    sequences: tuple[StoredSequence, ...]
    record_bytes: int
    file_bytes: int
    records: dict[str, int]
    is_open: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)


def inspect_store(path: Path | str) -> Inspection:
    """Look at a store that may be open in another process; raises as `KVStore.open` with readonly does."""
    from kvstore.storage.lock import holder_of

    directory = Directory(Path(path), None, None, readonly=True)
    try:
        archive, tier = directory.archive, directory.tier
        shared = Counter(ref for entry in archive.entries.values() for ref in {*entry.layers[0]})
        sequences = tuple(_sequence(entry, directory.rows, shared) for _, entry in sorted(archive.entries.items()))
        holder = holder_of(directory.path)
        kinds = Counter(Kind(key.kind).name.lower() for key in tier.iterate())
        return Inspection(
            str(path), directory.schema, sequences, tier.n_bytes, tier.file_bytes, dict(kinds),
            None if holder is None else str(holder),
        )  # fmt: skip
    finally:
        directory.close()


def _sequence(entry: CatalogEntry, rows: RowRecords, shared: Counter[Any]) -> StoredSequence:
    extents = entry.layers[0]
    row_bytes = len(entry.layers) * sum(rows.shape(ref).raw_bytes for ref in extents)
    covered = [ref.stop_row - ref.first_row for ref in entry.indexes if ref is not None]
    kinds = {ref.kind for ref in entry.indexes if ref is not None}
    return StoredSequence(
        entry.name,
        entry.n_rows,
        entry.budget,
        row_bytes,
        sum(ref.n_tokens for ref in extents if shared[ref] > 1),
        sum(covered) / len(entry.indexes),
        ", ".join(sorted(kinds)),
    )
