"""Counters and sizes of a buffer pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class PoolCounters:
    """What has happened since the pool was made; only ever grows.

    Attributes:
        lookups, hits: blocks looked up, and found.
        admissions: blocks that became resident. evictions: blocks that lost their frame to others.
        drops: blocks dropped.
        stalls: reservations that found too few frames, and admissions that had to leave blocks out.
        pins: frames pinned.
    """

    lookups: int = 0
    hits: int = 0
    admissions: int = 0
    evictions: int = 0
    drops: int = 0
    stalls: int = 0
    pins: int = 0

    @property
    def misses(self) -> int:
        """Blocks looked up and not found."""
        return self.lookups - self.hits


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment.

    Attributes:
        n_frames, free_frames, reserved_frames, resident_blocks: the first is the sum of the others.
        pinned_frames: that cannot be evicted now. guards: that live.
        frame_bytes, allocated_bytes: of one frame, and of all memory on the device (staging included).
        policy: its class.
        counters: see `PoolCounters`.
    """

    n_frames: int
    free_frames: int
    reserved_frames: int
    resident_blocks: int
    pinned_frames: int
    guards: int
    frame_bytes: int
    allocated_bytes: int
    policy: str
    counters: PoolCounters = field(default_factory=PoolCounters)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON; misses among the counters."""
        values = asdict(self)
        values["counters"]["misses"] = self.counters.misses
        return values
