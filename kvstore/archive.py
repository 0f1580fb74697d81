"""The directory of a durable store: its sequences on disk, and how they get there and back.

A sequence is saved in batches: rows first, under keys that no catalog names yet, and in the last batch the catalog's
entry that names them, together with the deletion of what no entry names any more. So a reopened store shows each
sequence as it was at one of its saves, whole, whenever the process ended.

Extents that a sequence in memory knows are held, whether an entry names them or not: its blocks may be nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvstore.errors import BlockNotFoundError, CorruptStoreError, ReadOnlyStoreError
from kvstore.row_records import RowRecords, row_key
from kvstore.saved import Saved
from kvstore.storage.catalog import CatalogEntry, ExtentRef, IndexRef, decode_entry, encode_entry
from kvstore.storage.key import Kind, RecordKey, key_prefix
from kvstore.storage.record import Record
from kvstore.storage.tier import Tier
from kvstore.table import Table

PART_BYTES = 8 << 20  # of an index
BATCH_RECORDS = 16
Ref = tuple[Kind, bytes, int, int]
"""What several entries may name: an extent of all layers (kind, sequence, generation, number), or an index."""


class Archive:
    """Saves and loads sequences; the store decides when.

    Attributes:
        tier: where the records are.
        entries: the catalog, by name.
        damaged: keys of entries that cannot be read, and why; only where `salvage` lets them pass.
    """

    def __init__(self, tier: Tier, rows: RowRecords, *, salvage: bool = False) -> None:
        self.tier = tier
        self._rows = rows
        self._salvage = salvage
        self.damaged: dict[RecordKey, str] = {}
        self._generation = 0
        self.entries: dict[str, CatalogEntry] = {}
        self._holders: Counter[Ref] = Counter()
        self._held: Counter[ExtentRef] = Counter()  # by sequences in memory
        self.read_catalog()

    def read_catalog(self) -> None:
        """Learn which sequences the tier holds; raises `CorruptStoreError` for a catalog that is damaged."""
        self.entries.clear()
        self._holders.clear()
        self.damaged.clear()
        for key in self.tier.iterate(key_prefix(Kind.CATALOG)):
            try:
                self._add_entry(decode_entry(_payload(self.tier, key)))
            except CorruptStoreError as error:
                if not self._salvage:
                    raise CorruptStoreError(
                        f"an entry of the catalog is damaged ({error}); check with repair gives it up"
                    ) from error
                self.damaged[key] = str(error)
        known = [ref[2] for ref in self._holders] + [entry.generation for entry in self.entries.values()]
        self._generation = max([self._generation, *known])

    @property
    def readonly(self) -> bool:
        """Whether nothing can be saved."""
        return self.tier.readonly

    def hold(self, extents: Iterable[ExtentRef]) -> None:
        """Keep extents on the disk for a sequence in memory, until `let_go`."""
        self._held.update(extents)

    def let_go(self, extents: Iterable[ExtentRef]) -> None:
        """Take `hold` back, and delete what nobody needs any more."""
        gone = self._unhold(extents)
        if gone and not self.readonly:
            self.tier.delete_many(self._keys(gone))

    def hold_only(self, extents: Iterable[ExtentRef]) -> None:
        """Hold these and nothing else, deleting nothing."""
        self._held = Counter(extents)

    def next_generation(self) -> int:
        """Return a number that no record carries yet."""
        self._generation += 1
        return self._generation

    def save(
        self,
        entry: CatalogEntry,
        saved: Saved,
        tables: Sequence[Table],
        indexes: Iterable[tuple[int, bytes, Any]],
        tokens: bytes | None,
    ) -> None:
        """Put a sequence on its way to the disk as it is now; `entry` lacks extents and indexes.

        `indexes` are those to be written: (layer, bytes, their `IndexRef` without number of parts); `tokens` those of
        its rows, None where they are on disk already. Raises
        `SpillFullError` or another `StorageError`; what was saved before stays then.
        """
        generation = self.next_generation()
        kept = saved.sound_extents(self._rows.block_tokens, self._rows.blocks_per_extent)
        first = kept[-1].number + kept[-1].n_blocks if kept else 0
        fresh = self._rows.extents(first, entry.n_rows, saved.sequence, generation)
        self._write(record for layer, table in enumerate(tables) for record in self._rows.records(table, layer, fresh))
        refs = [ref if self._holds_index(ref, layer) else None for layer, ref in enumerate(saved.indexes)]
        for layer, data, ref in indexes:
            parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
            keys = (RecordKey(Kind.INDEX, saved.sequence, generation, layer, part) for part in range(len(parts)))
            self._write(map(Record, keys, parts))
            refs[layer] = ref._replace(sequence=saved.sequence, generation=generation, n_parts=len(parts))
        extents = (*kept, *fresh)
        whole = entry._replace(layers=(extents,) * len(tables), indexes=tuple(refs))
        self.hold(extents)
        self._replace(whole, tokens, saved.extents)
        saved.extents, saved.indexes = extents, refs
        saved.n_rows = saved.valid_rows = entry.n_rows

    def load(self, entry: CatalogEntry, tables: Sequence[Table], left: range) -> Saved:
        """Read a sequence's rows into empty tables, all or none; see `RowRecords.load`. Its extents are held then."""
        if len(entry.layers) != len(tables):
            raise CorruptStoreError(f"{entry.name!r} has {len(entry.layers)} layers in the catalog, not {len(tables)}")
        try:
            for layer, (table, extents) in enumerate(zip(tables, entry.layers, strict=True)):
                self._rows.load(self.tier, table, layer, extents, left)
                if table.n_rows != entry.n_rows:
                    raise CorruptStoreError(
                        f"{entry.name!r} has {entry.n_rows} rows in the catalog, not {table.n_rows}"
                    )
        except BaseException:
            for table in tables:
                table.truncate(0)
            raise
        extents = tuple(entry.layers[0])
        self.hold(extents)
        return Saved(entry.sequence, entry.n_rows, entry.n_rows, extents, indexes=list(entry.indexes))

    def load_index(self, ref: IndexRef, layer: int) -> bytes:
        """Return the bytes of a stored index; raises `BlockNotFoundError` where a part is missing."""
        keys = [RecordKey(Kind.INDEX, ref.sequence, ref.generation, layer, part) for part in range(ref.n_parts)]
        return b"".join(_payload(self.tier, key) for key in keys)

    def drop(self, name: str, held: Iterable[ExtentRef] = ()) -> None:
        """Forget a sequence that held these extents, and records that no other one needs."""
        self._check_writable()
        entry, deletes = self.entries.get(name), []
        gone = self._unhold(held)
        if entry is not None:
            deletes = [_entry_key(entry), tokens_key(entry), *self._remove_entry(entry)]
        deletes += self._keys(ref for ref in gone if not self._is_needed(ref))
        if deletes:
            self.tier.write(deletes=deletes)

    def _holds_index(self, ref: IndexRef | None, layer: int) -> bool:
        return ref is not None and bool(self._holders[Kind.INDEX, ref.sequence, ref.generation, layer])

    def named_keys(self) -> Iterator[RecordKey]:
        """Yield the key of every record that belongs to some sequence."""
        for entry in self.entries.values():
            yield from (_entry_key(entry), tokens_key(entry))
            yield from self._keys(_extents(entry))
            yield from _index_keys(_indexes(entry), entry)

    def give_up_damaged(self) -> None:
        """Delete the entries that cannot be read; their rows belong to nobody then."""
        self.tier.delete_many(self.damaged)
        self.damaged.clear()

    def orphans(self) -> list[RecordKey]:
        """Return the keys of records that belong to no sequence: what a save that did not finish has left."""
        if self.damaged:
            return []  # whose they are cannot be known
        named = {*self.named_keys(), *self._keys(self._held)}
        return [key for key in self.tier.iterate() if key not in named]

    def cut(self, entry: CatalogEntry, n_rows: int, bad_layers: Sequence[int]) -> None:
        """Give a sequence up from n_rows on, the first row of an extent, and the indexes of these layers."""
        layers = [[ref for ref in refs if ref.number * self._rows.block_tokens < n_rows] for refs in entry.layers]
        indexes = [
            None if ref is None or layer in bad_layers or ref.stop_row > n_rows else ref
            for layer, ref in enumerate(entry.indexes)
        ]
        runs = [run for run in entry.runs if run[0] < n_rows]
        tokens = self.load_tokens(entry) if n_rows == entry.n_rows else None
        sound = entry._replace(n_rows=n_rows, runs=runs, layers=layers, indexes=indexes)
        if tokens is None:
            self.tier.delete_many([tokens_key(entry)])
        self._replace(sound, tokens)

    def load_tokens(self, entry: CatalogEntry) -> bytes | None:
        """Return the tokens stored with a sequence, None when there are none."""
        record = self.tier.get_many([tokens_key(entry)])[0]
        return None if record is None else bytes(record.payload)

    def _replace(self, entry: CatalogEntry, tokens: bytes | None, held: Iterable[ExtentRef] = ()) -> None:
        """Write an entry in place of the one with its name, in one batch with what that alone has named.

        `held` are extents that the sequence lets go of at the same time.
        """
        record = Record(_entry_key(entry), encode_entry(entry))
        puts = [record] if tokens is None else [record, Record(tokens_key(entry), tokens)]
        former = self.entries.get(entry.name)
        self._add_entry(entry)
        deletes = self._remove_entry(former) if former is not None else []
        if former is not None:
            self.entries[entry.name] = entry
            if _entry_key(former) != record.key:
                deletes += [_entry_key(former), tokens_key(former)]
        deletes += self._keys(self._unhold(held))
        self.tier.write(puts=puts, deletes=deletes)

    def _write(self, records: Iterable[Record]) -> None:
        self._check_writable()
        waiting = iter(records)
        while some := list(islice(waiting, BATCH_RECORDS)):
            self.tier.put_many(some)

    def _add_entry(self, entry: CatalogEntry) -> None:
        self.entries[entry.name] = entry
        self._holders.update(_refs(entry))

    def _remove_entry(self, entry: CatalogEntry) -> list[RecordKey]:
        """Take an entry out; returns the keys of what nobody needs any more."""
        self.entries.pop(entry.name, None)
        _subtract(self._holders, _refs(entry))
        extents = [ref for ref in _extents(entry) if not self._is_needed(ref)]
        indexes = [ref for ref in _indexes(entry) if not self._holders[ref]]
        return [*self._keys(extents), *_index_keys(indexes, entry)]

    def _unhold(self, extents: Iterable[ExtentRef]) -> list[ExtentRef]:
        """Take `hold` back; returns what nobody needs any more."""
        _subtract(self._held, extents := tuple(extents))
        return [ref for ref in extents if not self._is_needed(ref)]

    def _is_needed(self, ref: ExtentRef) -> bool:
        """Whether an entry names an extent, or a sequence in memory holds it."""
        return bool(self._held[ref] or self._holders[_row_ref(ref)])

    def _keys(self, extents: Iterable[ExtentRef]) -> Iterator[RecordKey]:
        """Yield the keys of the records that extents stand for."""
        return (row_key(ref, layer) for ref in extents for layer in range(self._rows.n_layers))

    def _check_writable(self) -> None:
        if self.readonly:
            raise ReadOnlyStoreError("the store was opened to be read; open it without readonly to change it")

    def _check(self) -> None:
        """Assert that the counts equal a recount, and that every record needed is there."""
        recount = Counter(ref for entry in self.entries.values() for ref in _refs(entry))
        assert recount == self._holders
        assert all(count > 0 for count in self._held.values())
        assert all(self.tier.contains(key) for key in (*self.named_keys(), *self._keys(self._held))
                   if key.kind in (Kind.ROWS, Kind.INDEX))  # fmt: skip


def _subtract(counts: Counter[Any], items: Iterable[Any]) -> None:
    """Take one off each count, and forget those that reach zero."""
    for item in items:
        counts[item] -= 1
        if counts[item] <= 0:
            del counts[item]


def _extents(entry: CatalogEntry) -> set[ExtentRef]:
    """The extents that an entry names, once for all layers."""
    return {ref for refs in entry.layers for ref in refs}


def _indexes(entry: CatalogEntry) -> list[Ref]:
    """The indexes that an entry names, by layer."""
    return [
        (Kind.INDEX, ref.sequence, ref.generation, layer) for layer, ref in enumerate(entry.indexes) if ref is not None
    ]


def _refs(entry: CatalogEntry) -> list[Ref]:
    return [*map(_row_ref, sorted(_extents(entry))), *_indexes(entry)]


def _row_ref(ref: ExtentRef) -> Ref:
    return Kind.ROWS, ref.sequence, ref.generation, ref.number


def _index_keys(refs: Iterable[Ref], entry: CatalogEntry) -> Iterator[RecordKey]:
    """Yield the keys of the parts of an entry's indexes."""
    for kind, sequence, generation, layer in refs:
        ref = entry.indexes[layer]
        for part in range(ref.n_parts if ref is not None else 0):
            yield RecordKey(kind, sequence, generation, layer, part)


def _entry_key(entry: CatalogEntry) -> RecordKey:
    return RecordKey(Kind.CATALOG, entry.sequence, entry.generation)


def tokens_key(entry: CatalogEntry) -> RecordKey:
    """Return the key of the tokens stored with a sequence."""
    return RecordKey(Kind.TOKENS, entry.sequence, entry.generation)


def _payload(tier: Tier, key: RecordKey) -> bytes:
    record = tier.get_many([key])[0]
    if record is None:
        raise BlockNotFoundError(f"{key} is not in the spill; run check, or drop the sequence")
    return bytes(record.payload)
