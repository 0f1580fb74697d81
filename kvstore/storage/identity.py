"""The record that says whose a data file is; never handed out."""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import UnsupportedFormatError
from kvstore.storage.key import SEQUENCE_BYTES, Kind, RecordKey
from kvstore.storage.record import Record

IDENTITY = RecordKey(Kind.IDENTITY, bytes(SEQUENCE_BYTES), 0)
OURS = b"kvstore spill\0"


def identity_of(store_id: bytes) -> Record:
    """Return the record for a store's 16 bytes."""
    return Record(IDENTITY, OURS + store_id)


def store_id_in(record: Record | None, path: Path) -> bytes:
    """Return the 16 bytes of the store; raises `UnsupportedFormatError` for a file of somebody else."""
    if record is None:
        raise UnsupportedFormatError(f"{path} was not written by kvstore; move it elsewhere")
    payload = bytes(record.payload)
    if not payload.startswith(OURS) or len(payload) != len(OURS) + SEQUENCE_BYTES:
        raise UnsupportedFormatError(f"{path} names itself {payload[:32]!r}; a newer version wrote it")
    return payload[len(OURS) :]
