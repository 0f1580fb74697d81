"""A record: header, payload and checksum, as they lie on disk.

The checksum is seeded with the key, so that a record that lies under another's key is as wrong as one with a flipped
bit. Nothing is believed before it is checked: sizes before they are used, the checksum before any other field counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

from kvstore.errors import ConfigError, CorruptBlockError, KVStoreError, UnsupportedFormatError
from kvstore.storage.buffers import Buffers
from kvstore.storage.encodings import Buffer, Encoding, encoded_bytes
from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.shape import RowShape

MAGIC = b"KVRC"
FORMAT = 1
MAX_RECORD_BYTES = 16 << 20
_HEADER = struct.Struct("<4sHHHBB7I16sQQ")  # docs/format.md says what each is
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size
OVERHEAD_BYTES = HEADER_BYTES + _CHECKSUM.size
MAX_PAYLOAD_BYTES = MAX_RECORD_BYTES - OVERHEAD_BYTES
KNOWN_FLAGS = 0  # of the 16, each makes older programs refuse the record
Encoded = bytearray  # a record as it is stored
Sizes = tuple[int, ...]
_DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
_DTYPE_NAMES = {code: name for name, code in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """What a tier keeps under a key.

    Attributes:
        key: names the record.
        payload: rows in their encoding (kind ROWS), or bytes that mean nothing here.
        shape: of the rows; None for the other kinds.
        encoding: of the rows.
    """

    key: RecordKey
    payload: Buffer
    shape: RowShape | None = None
    encoding: Encoding = Encoding.RAW

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole record on disk."""
        return len(self.payload) + OVERHEAD_BYTES


def encode_record(record: Record, buffers: Buffers | None = None) -> Encoded:
    """Return the record as it is stored, in memory from `buffers`; raises `ConfigError` when its parts do not fit."""
    key, payload, shape = record.key, record.payload, record.shape
    if isinstance(payload, memoryview) and (payload.format != "B" or payload.ndim != 1):
        what = f"{payload.format!r} of {payload.ndim} dimensions"
        raise ConfigError(f"a payload must be plain bytes, not {what}; cast it to 'B'")
    _check_parts(key.kind, shape, record.encoding, len(payload))
    packed_key = key.pack()
    sizes = (shape.n_blocks, shape.n_tokens, shape.n_heads, shape.key_dim, shape.value_dim) if shape else (0,) * 5
    codes = (key.kind, record.encoding, _DTYPES[shape.dtype] if shape else 0, key.layer, key.number)
    data = buffers.take(record.n_bytes) if buffers else bytearray(record.n_bytes)
    _HEADER.pack_into(data, 0, MAGIC, FORMAT, 0, *codes, *sizes, key.sequence, key.generation, len(payload))
    body = memoryview(data)
    # numpy copies without the interpreter's lock, so that the writer's thread goes on meanwhile.
    np.copyto(np.frombuffer(body[HEADER_BYTES : -_CHECKSUM.size], np.uint8), np.frombuffer(payload, np.uint8))
    _CHECKSUM.pack_into(data, len(data) - _CHECKSUM.size, _checksum(packed_key, body[: -_CHECKSUM.size]))
    return data


def decode_record(key: RecordKey, data: Buffer) -> Record:
    """Return the record that lies under `key`; its payload is a view of `data`.

    Raises `CorruptBlockError`, or `UnsupportedFormatError` where a newer program wrote it; both say what is wrong.
    """
    if not OVERHEAD_BYTES <= len(data) <= MAX_RECORD_BYTES:
        raise CorruptBlockError(
            f"{key}: {len(data)} bytes, where records have {OVERHEAD_BYTES} to {MAX_RECORD_BYTES}; {_DAMAGED}"
        )
    magic, version, flags, *codes, sequence, generation, payload_bytes = _HEADER.unpack_from(data)
    if (magic, version, payload_bytes) != (MAGIC, FORMAT, len(data) - OVERHEAD_BYTES):
        raise _unreadable(key, magic, version, payload_bytes, len(data) - OVERHEAD_BYTES)
    body = memoryview(data)
    payload = body[HEADER_BYTES : -_CHECKSUM.size]
    (stored,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    found = _checksum(key.pack(), body[: -_CHECKSUM.size])
    if stored != found:
        raise CorruptBlockError(f"{key}: its checksum is {stored:016x}, its bytes have {found:016x}; {_DAMAGED}")
    kind, encoding, dtype, layer, number, *sizes = codes
    if flags & ~KNOWN_FLAGS:
        raise UnsupportedFormatError(f"{key}: has flags {flags:#06x} that are unknown here; {_NEWER}")
    found_key: tuple[object, ...] = (kind, sequence, generation, layer, number)
    if found_key != key:
        raise CorruptBlockError(
            f"{key}: is another's, {kind} {sequence.hex()}.{generation} {layer} {number}; {_DAMAGED}"
        )
    try:
        shape, form = _form(kind, encoding, dtype, tuple(sizes), payload_bytes)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{key}: {error}; {_NEWER}") from None
    except ConfigError as error:
        raise CorruptBlockError(f"{key}: {error}; {_DAMAGED}") from None
    return Record(key, payload, shape, form)


_DAMAGED = "the record is damaged, drop the sequence and store it again"
_NEWER = "open it with the version that wrote it, or a newer one"


def _unreadable(key: RecordKey, magic: bytes, version: int, says: int, has: int) -> KVStoreError:
    """Return the error for a header whose beginning, or length, is not that of a record here."""
    if magic != MAGIC:
        return CorruptBlockError(f"{key}: begins with {magic!r} instead of {MAGIC!r}; {_DAMAGED}")
    if version > FORMAT:
        return UnsupportedFormatError(f"{key}: is of format {version}, known here is {FORMAT}; {_NEWER}")
    if version < 1:
        return CorruptBlockError(f"{key}: is of format {version}, which never was; {_DAMAGED}")
    return CorruptBlockError(f"{key}: says that it holds {says} bytes, but has {has}; {_DAMAGED}")


@lru_cache(maxsize=256)  # few shapes come over and over
def _form(kind: int, code: int, dtype: int, sizes: Sizes, payload_bytes: int) -> tuple[RowShape | None, Encoding]:
    """Return shape and encoding; raises `ConfigError` when codes and sizes disagree with each other or the length."""
    if kind != Kind.ROWS and (any(sizes) or dtype):
        raise ConfigError(f"a shape {sizes} of dtype {dtype}, but no rows")
    if kind == Kind.ROWS and dtype not in _DTYPE_NAMES:
        raise UnsupportedFormatError(f"rows of dtype {dtype}, unknown here")
    if code not in Encoding._value2member_map_:
        raise UnsupportedFormatError(f"encoding {code}, unknown here")
    shape = RowShape(_DTYPE_NAMES[dtype], *sizes) if kind == Kind.ROWS else None
    _check_parts(kind, shape, Encoding(code), payload_bytes)
    return shape, Encoding(code)


def _checksum(packed_key: bytes, header_and_payload: memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(header_and_payload, seed=xxhash.xxh3_64_intdigest(packed_key)))


def _check_parts(kind: int, shape: RowShape | None, encoding: Encoding, payload_bytes: int) -> None:
    """Raise `ConfigError` unless kind, shape, encoding and length agree."""
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ConfigError(f"a payload of {payload_bytes} bytes is above the {MAX_PAYLOAD_BYTES} of a record; split it")
    if kind not in Kind._value2member_map_:
        raise ConfigError(f"a record's kind must be one of {[int(k) for k in Kind]}, not {kind}")
    if (kind == Kind.ROWS) != (shape is not None):
        raise ConfigError(f"a record has a shape just when it holds rows, not for kind {kind} and {shape}")
    if shape is None:
        if encoding is not Encoding.RAW:
            raise ConfigError(f"only rows have an encoding; kind {kind} is RAW, not {encoding.name}")
        return
    shape.check()
    expected = encoded_bytes(shape, encoding)
    if payload_bytes != expected:
        raise ConfigError(f"{payload_bytes} bytes of {encoding.name} where {shape} has {expected}")
