"""The contract of a tier: a place where records live."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

from kvstore.errors import ForkedStoreError, ReadOnlyStoreError, StoreClosedError
from kvstore.storage.key import RecordKey
from kvstore.storage.record import Record


class Tier(ABC):
    """Keeps records by key. A batch is written whole or not at all, and batches in the order they came.

    What `write` has accepted is seen by reads at once. It is *written* when `written` has reached the batch's number,
    which `flush` waits for: until then the caller must be able to give the records again. When a batch cannot be
    written, it and those accepted after it are dropped, and the next `write` or `flush` raises the error, once.

    Any method may be called from any thread of the process that opened the tier. In another process, and after
    `close`, they raise `ForkedStoreError` and `StoreClosedError`. Reads raise `CorruptBlockError` rather than return
    bytes that are not those written.
    """

    def __init__(self, *, readonly: bool = False) -> None:
        self.readonly = readonly
        self.damaged_records = 0  # that reads have refused
        self._pid = os.getpid()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise ForkedStoreError(f"a {type(self).__name__} cannot be pickled; send its path, and open it read-only there")

    def put_many(self, records: Iterable[Record]) -> int:
        """Write records, all or none; the last one under a key counts. Returns the batch's number."""
        return self.write(puts=records)

    def delete_many(self, keys: Iterable[RecordKey]) -> int:
        """Forget records, all or none; keys that are not there are no error. Returns the batch's number."""
        return self.write(deletes=keys)

    @abstractmethod
    def write(self, puts: Iterable[Record] = (), deletes: Iterable[RecordKey] = ()) -> int:
        """Forget `deletes`, then keep copies of `puts`, as one batch; returns its number, which grows.

        Raises `SpillFullError`, `ReadOnlyStoreError`, `StorageError`, or `ConfigError` for a record that is none;
        nothing of the batch is kept then.
        """

    @abstractmethod
    def get_many(self, keys: Iterable[RecordKey]) -> list[Record | None]:
        """Return the record under each key, or None where there is none; payloads are copies.

        Raises `CorruptBlockError` or `UnsupportedFormatError` for a record that cannot be trusted.
        """

    def contains(self, key: RecordKey) -> bool:
        """Whether there is a record under the key, sound or not."""
        return next(self.iterate(key.pack()), None) is not None

    @abstractmethod
    def iterate(self, prefix: bytes = b"") -> Iterator[RecordKey]:
        """Yield the keys whose bytes begin with `prefix` (see `key_prefix`), ascending, as they are at this moment."""

    @property
    @abstractmethod
    def n_records(self) -> int:
        """Records written."""

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes of the records written, headers and checksums included."""

    @property
    @abstractmethod
    def written(self) -> int:
        """Number of the last batch written, 0 at first; the error of one that was dropped is raised before the next."""

    def flush(self) -> None:
        """Wait until every batch accepted is written; raises what went wrong."""
        self._check_usable()

    def sync(self) -> None:
        """Flush, and wait until a loss of power cannot take it back."""
        self.flush()

    def vacuum(self) -> int:
        """Give the room of what was deleted back to the system; returns how many bytes."""
        self._check_writable()
        return 0

    def close(self) -> None:
        """Flush and give up files and threads, also where that raises; a second call does nothing."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @abstractmethod
    def _check(self) -> None:
        """Assert the invariants: the accounting equals a recount."""

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedStoreError(
                f"{self._name()} was opened by process {self._pid}, this is {os.getpid()}; open it here, read-only"
            )
        if self._closed:
            raise StoreClosedError(f"{self._name()} is closed; open it again")

    def _check_writable(self) -> None:
        self._check_usable()
        if self.readonly:
            raise ReadOnlyStoreError(f"{self._name()} was opened to be read; open it without readonly to write")

    def _name(self) -> str:
        place: Any = getattr(self, "folder", None)
        return f"the {type(self).__name__}" + (f" in {place}" if isinstance(place, Path) else "")
