"""Counters and sizes of a store."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvstore.store import KVStore


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
        codebook_bytes: the model's codebooks, which sequences share. scratch_bytes: buffers of the calling thread.
        unloads: sequences taken out of memory to make room, or by `unload`.
        disk_bytes, queued_bytes: of records on disk, and of those that wait to be written (0 in memory).
        drift: the largest of all tables (1: recent rows are coded as well as those trained on; 0: not known yet).
        disk_blocks: blocks of sequences in memory that lie on the disk only; spills: blocks that moved there, ever.
        read_extents, read_bytes: that queries and truncates have read from the disk since the store was opened.
        damaged_records: records that were refused since then, by any reader.
        pool_bytes, pool_blocks: frames allocated, and blocks in them. pool_lookups, pool_hits: blocks looked for and
            found. pool_evictions: blocks that made room for others. pool_stalls: times that frames were too few.
        pool_pins: frames pinned right now.
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
    scratch_bytes: int = 0
    drift: float = 0.0
    disk_bytes: int = 0
    queued_bytes: int = 0
    unloads: int = 0
    disk_blocks: int = 0
    spills: int = 0
    read_extents: int = 0
    read_bytes: int = 0
    damaged_records: int = 0
    pool_bytes: int = 0
    pool_blocks: int = 0
    pool_lookups: int = 0
    pool_hits: int = 0
    pool_evictions: int = 0
    pool_stalls: int = 0
    pool_pins: int = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes that the store holds in memory: rows, index, pool and scratch."""
        return (
            self.heap_reserved_bytes + self.index_bytes + self.codebook_bytes + self.pool_bytes + self.scratch_bytes
            + self.queued_bytes
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, ready for JSON."""
        return asdict(self)


def collect(store: KVStore) -> StoreStats:
    """Look at a store; O(sequences * layers)."""
    sequences, counters, persistence = store._sequences.values(), store.counters, store._persistence
    keepers = [keeper for seq in sequences for keeper in seq._indexes]
    indexes = [keeper.index for keeper in keepers if keeper.index is not None]
    return StoreStats(
        sequences=len(store),
        rows=sum(len(seq) for seq in sequences),
        blocks=store.heap.used_blocks,
        heap_used_bytes=store.heap.used_bytes,
        heap_reserved_bytes=store.heap.reserved_bytes,
        index_bytes=sum(index.nbytes for index in indexes),
        index_bytes_per_key=float(np.mean([i.code_bytes_per_key for i in indexes])) if indexes else 0.0,
        indexed_rows=sum(index.n_rows for index in indexes),
        index_builds=sum(keeper.n_builds for keeper in keepers),
        codebook_bytes=store.codebooks.nbytes,
        scratch_bytes=store.workspace.nbytes,
        drift=max((keeper.drift_ratio or 0.0 for keeper in keepers), default=0.0),
        disk_blocks=sum(table.n_spilled for seq in sequences for table in seq._tables),
        counters=replace(counters, attends=dict(counters.attends)),
        **(persistence.sizes() if persistence is not None else {}),
        **(store._spill_pool.counts() if store._spill_pool is not None else {}),
    )
