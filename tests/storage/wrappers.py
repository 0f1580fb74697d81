"""Tiers around a tier, for tests: one that fails, one that is slow, one that counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore.errors import StorageError
from kvstore.storage.key import RecordKey
from kvstore.storage.record import Record
from kvstore.storage.tier import Tier


class WrapperTier(Tier):
    """Hands every call on, after telling `before` its name."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(readonly=inner.readonly)
        self.inner = inner

    def before(self, call: str) -> None:
        """Is told each call before it is made; an exception stops it."""

    def write(self, puts: Iterable[Record] = (), deletes: Iterable[RecordKey] = ()) -> int:
        self._check_writable()
        self.before("write")
        return self.inner.write(puts, deletes)

    def get_many(self, keys: Iterable[RecordKey]) -> list[Record | None]:
        self._check_usable()
        self.before("get_many")
        return self.inner.get_many(keys)

    def iterate(self, prefix: bytes = b"") -> Iterator[RecordKey]:
        self._check_usable()
        self.before("iterate")
        return self.inner.iterate(prefix)

    @property
    def n_records(self) -> int:
        return self.inner.n_records

    @property
    def n_bytes(self) -> int:
        return self.inner.n_bytes

    @property
    def written(self) -> int:
        return self.inner.written

    def flush(self) -> None:
        self._check_usable()
        self.before("flush")
        self.inner.flush()

    def sync(self) -> None:
        self._check_usable()
        self.before("sync")
        self.inner.sync()

    def vacuum(self) -> int:
        self._check_writable()
        self.before("vacuum")
        return self.inner.vacuum()

    def close(self) -> None:
        super().close()
        self.inner.close()

    def _check(self) -> None:
        self.inner._check()


class FaultyTier(WrapperTier):
    """Its n-th call fails, counted from 1 (0: none does), before anything is done."""

    def __init__(self, inner: Tier, fail_at: int = 0) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self.n_calls = 0

    def before(self, call: str) -> None:
        self.n_calls += 1
        if self.n_calls == self.fail_at:
            raise StorageError(f"call {self.n_calls}, {call}, was made to fail")


class SlowTier(WrapperTier):
    """Every call takes `seconds` longer."""

    def __init__(self, inner: Tier, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    def before(self, call: str) -> None:
        time.sleep(self.seconds)


class CountingTier(WrapperTier):
    """Counts calls by name, in `calls`."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def before(self, call: str) -> None:
        self.calls[call] += 1
