"""Memory for records on their way to the disk, used again and again.

Fresh memory costs more than filling it: the system clears every page of it first, and takes large pieces back when they
are freed. A record of 256 KiB is written half as fast again without this.
"""

from __future__ import annotations

import threading

LEAST_BYTES = 32 << 10  # below this the allocator keeps what is freed


class Buffers:
    """Hands out bytearrays and takes them back; keeps at most `limit_bytes`, those given back last."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: dict[int, list[bytearray]] = {}  # by size
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait to be handed out."""
        return self._kept_bytes

    def take(self, n_bytes: int) -> bytearray:
        """Return a buffer of just this size; what it holds is undefined."""
        with self._lock:
            kept = self._kept.get(n_bytes)
            if kept:
                self._kept_bytes -= n_bytes
                return kept.pop()
        return bytearray(n_bytes)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back; nobody may look at it any more."""
        n_bytes = len(buffer)
        if not LEAST_BYTES <= n_bytes <= self.limit_bytes:
            return
        with self._lock:
            if self._kept_bytes + n_bytes > self.limit_bytes:  # sizes have changed: begin anew
                self._kept.clear()
                self._kept_bytes = 0
            self._kept.setdefault(n_bytes, []).append(buffer)
            self._kept_bytes += n_bytes

    def _check(self) -> None:
        """Assert the invariants: the bytes kept equal a recount and are within the limit."""
        assert self._kept_bytes == sum(len(buffer) for kept in self._kept.values() for buffer in kept)
        assert self._kept_bytes <= self.limit_bytes
