"""How much a spill holds."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.storage.key import KEY_BYTES
from kvstore.storage.spill_settings import PAGE_BYTES, SpillSettings

RUN_HEADER_BYTES = 16  # LMDB's, before each record that is too large for a shared page
INLINE_BYTES = PAGE_BYTES // 2 - 64  # about what LMDB still puts into a page with others


class Usage(NamedTuple):
    """Records, their bytes, and the bytes of the pages that they take, nearly."""

    n_records: int = 0
    n_bytes: int = 0
    page_bytes: int = 0

    def plus(self, record_bytes: int) -> Usage:
        """With one record more."""
        return Usage(self.n_records + 1, self.n_bytes + record_bytes, self.page_bytes + pages_of(record_bytes))

    def minus(self, record_bytes: int) -> Usage:
        """With one record less."""
        return Usage(self.n_records - 1, self.n_bytes - record_bytes, self.page_bytes - pages_of(record_bytes))


def pages_of(record_bytes: int) -> int:
    """Bytes of the pages that a record takes.

    >>> pages_of(262144 + 80), pages_of(100)
    (266240, 148)
    """
    if record_bytes <= INLINE_BYTES:
        return record_bytes + KEY_BYTES + 16
    return -(-(record_bytes + RUN_HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES


def too_full(wanted_bytes: int, usage: Usage, settings: SpillSettings, why: str) -> str:
    """Return what to say when batches do not fit."""
    return (
        f"{wanted_bytes} bytes do not fit: {usage.page_bytes} of {settings.capacity_bytes} bytes for records are used "
        f"(spill_bytes={settings.spill_bytes}; {why}); drop a sequence, vacuum, or open with a larger spill_bytes"
    )
