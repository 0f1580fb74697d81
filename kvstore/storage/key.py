"""The key of a record: whose it is, and which part."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from kvstore.errors import ConfigError, CorruptBlockError

_KEY = struct.Struct(">H16sQHI")  # big-endian: sorted bytes are sorted keys
_LIMITS = (1 << 16, 0, 1 << 64, 1 << 16, 1 << 32)
KEY_BYTES = _KEY.size
SEQUENCE_BYTES = 16


class Kind(IntEnum):
    """What a record holds. IDENTITY says whose file it is, and is never handed out."""

    IDENTITY = 0
    ROWS = 1
    INDEX = 2
    CATALOG = 3
    TOKENS = 4


class RecordKey(NamedTuple):
    """Names one record; sorted by kind, sequence, generation, layer, number.

    Attributes:
        kind: a `Kind`.
        sequence: uuid of the sequence that owns the record, 16 bytes.
        generation: of the sequence; a name that is used again has another.
        layer: table of the sequence, 0 where the record belongs to all.
        number: of the first block for ROWS; of the part for the others.

    >>> key = RecordKey(Kind.ROWS, bytes(16), 7, 2, 64)
    >>> RecordKey.unpack(key.pack()) == key, len(key.pack())
    (True, 32)
    """

    kind: int
    sequence: bytes
    generation: int
    layer: int = 0
    number: int = 0

    def pack(self) -> bytes:
        """Return the key's 32 bytes; raises `ConfigError` for a part out of its range."""
        if type(self.sequence) is not bytes or len(self.sequence) != SEQUENCE_BYTES:
            raise ConfigError(f"a record's sequence must be a uuid of {SEQUENCE_BYTES} bytes, not {self.sequence!r}")
        try:
            return _KEY.pack(*self)
        except struct.error:
            names = zip(self._fields, self, _LIMITS, strict=True)
            wrong = [f"{n}={x!r} (0 to {top - 1})" for n, x, top in names if top and not _within(x, top)]
            raise ConfigError(f"a record's key is out of range: {', '.join(wrong)}") from None

    @classmethod
    def unpack(cls, data: bytes) -> RecordKey:
        """Return the key that 32 bytes stand for; raises `CorruptBlockError` if they are no key."""
        if len(data) != KEY_BYTES:
            raise CorruptBlockError(f"a key of {len(data)} bytes where keys have {KEY_BYTES}; the file is damaged")
        key = cls(*_KEY.unpack(data))
        if key.kind not in Kind._value2member_map_:
            raise CorruptBlockError(f"a key of kind {key.kind}, which does not exist; the file is damaged")
        return key

    def __str__(self) -> str:
        kind = Kind(self.kind).name if self.kind in Kind._value2member_map_ else str(self.kind)
        return f"{kind} {self.sequence.hex()}.{self.generation} layer {self.layer} number {self.number}"


def key_prefix(kind: int, sequence: bytes = b"", generation: int | None = None, layer: int | None = None) -> bytes:
    """Return the bytes that the keys of a kind, of a sequence of it, ... begin with, for `Tier.iterate`.

    >>> RecordKey(Kind.INDEX, bytes(16), 3, 1).pack().startswith(key_prefix(Kind.INDEX, bytes(16), 3))
    True
    """
    whole = RecordKey(kind, sequence or bytes(SEQUENCE_BYTES), generation or 0, layer or 0).pack()
    if layer is not None:
        return whole[:28]
    if generation is not None:
        return whole[:26]
    return whole[:18] if sequence else whole[:2]


def _within(value: object, top: int) -> bool:
    return isinstance(value, int) and 0 <= value < top
