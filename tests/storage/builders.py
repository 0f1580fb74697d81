"""Records and settings that the tests of storage share."""

from __future__ import annotations

import random

from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.record import Record
from kvstore.storage.shape import RowShape
from kvstore.storage.spill_settings import MIB, SpillSettings

ALICE, BOB = b"alice".ljust(16, b"\0"), b"bob".ljust(16, b"\0")
SHAPE = RowShape("float16", n_blocks=2, n_tokens=16, n_heads=2, key_dim=8, value_dim=4)
SETTINGS = SpillSettings(8 * MIB)


def noise(n_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n_bytes)


def opaque(number: int = 0, n_bytes: int = 100, *, seed: int | None = None, sequence: bytes = ALICE) -> Record:
    """A record of the log with content of its own."""
    return Record(RecordKey(Kind.TOKENS, sequence, 1, 0, number), noise(n_bytes, number if seed is None else seed))


def rows(number: int = 0, *, layer: int = 0, seed: int = 0, shape: RowShape = SHAPE, sequence: bytes = ALICE) -> Record:
    """A record of rows, raw."""
    return Record(RecordKey(Kind.ROWS, sequence, 1, layer, number), noise(shape.raw_bytes, seed), shape)


def content(record: Record | None) -> bytes | None:
    return None if record is None else bytes(record.payload)
