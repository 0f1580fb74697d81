"""Counters and sizes of a store."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Counters:
    """What has happened since the store was made; only ever grows.

    Attributes:
        attends: attention queries answered (one a sequence, layer and token), by plan method.
        topks: top-k queries answered.
        rows_attended, rows_available: rows those attention queries read, and could have read.
        steps: steps committed. aborted_steps: steps rolled back.
    """

    attends: dict[str, int] = field(default_factory=lambda: {"dense": 0, "flat": 0, "index": 0})
    topks: int = 0
    rows_attended: int = 0
    rows_available: int = 0
    steps: int = 0
    aborted_steps: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store at one moment.

    Attributes:
        sequences, rows, blocks: what is held (a row counts once, for all layers).
        heap_used_bytes, heap_reserved_bytes: blocks handed out, and memory taken from the system.
        index_bytes: codes (with room to grow) and codebooks.
        index_bytes_per_key: bytes of code for one key of one head, mean over the tables with an index (0: none).
        indexed_rows, index_builds: rows covered, added up over tables, and trainings done.
        counters: see `Counters`.
        codebook_bytes: the model's codebooks, which sequences share.
        unloads: sequences taken out of memory to make room, or by `unload`.
        disk_bytes, queued_bytes: of records on disk, and of those that wait to be written (0 in memory).
        drift: the largest of all tables (1: recent rows are coded as well as those trained on; 0: not known yet).
    """

    sequences: int
    rows: int
    blocks: int
    heap_used_bytes: int
    heap_reserved_bytes: int
    index_bytes: int
    index_bytes_per_key: float
    indexed_rows: int
    index_builds: int
    counters: Counters
    codebook_bytes: int = 0
    drift: float = 0.0
    disk_bytes: int = 0
    queued_bytes: int = 0
    unloads: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, ready for JSON."""
        return asdict(self)
