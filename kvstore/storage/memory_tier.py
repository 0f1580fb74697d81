"""A tier in memory: the simplest that keeps the contract."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from kvstore.storage.key import RecordKey
from kvstore.storage.record import Record, decode_record, encode_record
from kvstore.storage.tier import Tier


class MemoryTier(Tier):
    """Records in a dictionary, in the bytes that a disk would hold. Gone when it is closed.

    >>> tier = MemoryTier()
    >>> _ = tier.put_many([Record(RecordKey(4, bytes(16), 0), b"text")])
    >>> [bytes(record.payload) for record in tier.get_many(tier.iterate())]
    [b'text']
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[bytes, bytes] = {}
        self._n_bytes = 0
        self._written = 0
        self._lock = threading.Lock()

    def write(self, puts: Iterable[Record] = (), deletes: Iterable[RecordKey] = ()) -> int:
        """Forget, then keep copies, at once."""
        self._check_writable()
        encoded = {record.key.pack(): bytes(encode_record(record)) for record in puts}
        gone = [key.pack() for key in deletes]
        with self._lock:
            for key in (*gone, *encoded):
                self._n_bytes -= len(self._records.pop(key, b""))
            self._records.update(encoded)
            self._n_bytes += sum(map(len, encoded.values()))
            self._written += 1
            return self._written

    def get_many(self, keys: Iterable[RecordKey]) -> list[Record | None]:
        """Return the records, or None."""
        self._check_usable()
        keys = list(keys)
        with self._lock:
            found = [self._records.get(key.pack()) for key in keys]
        return [data if data is None else decode_record(key, data) for key, data in zip(keys, found, strict=True)]

    def iterate(self, prefix: bytes = b"") -> Iterator[RecordKey]:
        """Yield keys, ascending."""
        self._check_usable()
        with self._lock:
            keys = sorted(key for key in self._records if key.startswith(prefix))
        return map(RecordKey.unpack, keys)

    @property
    def n_records(self) -> int:
        """Records held."""
        return len(self._records)

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        return self._n_bytes

    @property
    def written(self) -> int:
        """Number of the last batch."""
        return self._written

    def close(self) -> None:
        """Forget everything."""
        super().close()
        with self._lock:
            self._records.clear()
            self._n_bytes = 0

    def _check(self) -> None:
        assert self._n_bytes == sum(map(len, self._records.values()))
