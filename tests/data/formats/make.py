"""Writes the directory of a format as this version writes it: `python -m tests.data.formats.make v1`.

Run once, when a format is released; what it has written is never written again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.schema import Schema
from kvstore.storage.catalog import CatalogEntry, ExtentRef, IndexRef, encode_entry
from kvstore.storage.encodings import Encoding, encode_rows
from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.manifest import Manifest, write_manifest
from kvstore.storage.record import Record
from kvstore.storage.shape import RowShape
from kvstore.storage.spill_settings import MIB, SpillSettings

STORE_ID = "00112233445566778899aabbccddeeff"
BOOK, FORK = bytes(range(16)), bytes(range(16, 32))
SCHEMA = Schema(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=8, value_dim=4, dtype="float16", block_tokens=4)
SCHEMA_FIELDS = {  # spelled out: fields that a schema gets later were not there
    "n_layers": 2,
    "n_q_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "value_dim": 4,
    "dtype": "float16",
    "block_tokens": 4,
    "scale": 8**-0.5,
    "rope": [],
    "fingerprint": "",
}
MANIFEST = Manifest(STORE_ID, SCHEMA_FIELDS, "process", boot_id="a boot", versions={"lmdb": "3.0.0"})
FULL, OPEN = RowShape("float16", 2, 8, 2, 8, 4), RowShape("float16", 1, 3, 2, 8, 4)


def numbers(n_bytes: int, start: int) -> bytes:
    """Bytes that any program can make again: finite float16, little-endian."""
    return b"".join((0x3000 + (start + 7 * i) % 0x1000).to_bytes(2, "little") for i in range(n_bytes // 2))


def rows(layer: int, number: int, shape: RowShape, encoding: Encoding = Encoding.RAW) -> Record:
    """Return the rows of an extent."""
    used, payload = encode_rows(numbers(shape.raw_bytes, 100 * layer + number), shape, encoding)
    return Record(RecordKey(Kind.ROWS, BOOK, 1, layer, number), bytes(payload), shape, used)


def entry(name: str, sequence: bytes, n_rows: int) -> CatalogEntry:
    """Return the catalog entry of a sequence over the book's extents."""
    extents = (ExtentRef(BOOK, 1, 0, 2, 8), ExtentRef(BOOK, 1, 2, 1, 3))[: 1 + (n_rows > 8)]
    index = IndexRef(BOOK, 1, "pq", 1, 2, 1, 6)
    return CatalogEntry(name, sequence, 1, n_rows, 1, 0.25, ((0, -1), (5, 100)), (extents, extents), (index, None))


def records() -> list[Record]:
    """Return every record of the directory: each kind, and each encoding."""
    book = [
        rows(0, 0, FULL),
        rows(0, 2, OPEN),
        rows(1, 0, FULL, Encoding.INT8),
        rows(1, 2, OPEN, Encoding.BF16),
        Record(RecordKey(Kind.INDEX, BOOK, 1, 0, 0), numbers(100, 1)),
        Record(RecordKey(Kind.INDEX, BOOK, 1, 0, 1), numbers(5000, 2)),
        Record(RecordKey(Kind.TOKENS, BOOK, 1), b"a note"),
    ]
    entries = [entry("book", BOOK, 11), entry("fork", FORK, 6)]
    return book + [Record(RecordKey(Kind.CATALOG, e.sequence, e.generation), encode_entry(e)) for e in entries]


def write(folder: Path) -> None:
    """Write manifest and spill, as a store does that is closed."""
    with LmdbTier(folder, SpillSettings(MIB), store_id=bytes.fromhex(STORE_ID)) as tier:
        tier.put_many(records())
    write_manifest(folder, MANIFEST.closed())
    for lock in folder.glob("*-lock"):
        lock.unlink()


if __name__ == "__main__":
    write(Path(__file__).parent / sys.argv[1])
