"""The buffer pool above the disk: frames for blocks that the heap has no room for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.buffer_pool import BufferPool, PinGuard, admission_limit
from kvstore.buffer_pool.admission import best_first
from kvstore.config import StoreConfig
from kvstore.index.workspace import Workspace
from kvstore.kernels.work import row_sizes
from kvstore.schema import Schema
from kvstore.spill_reader import Bytes, SpillReader
from kvstore.table import Table

IntArray = npt.NDArray[np.int64]
NUMBER_BITS = 24
"""Of a block's id: 16 million blocks of a table; the rest says which save wrote it, and the layer."""


class SpillPool:
    """Finds blocks of any table in the pool, and lets in those that hold most of what a query asks for.

    A block on the disk never changes, so neither does a frame. Forks that share an extent share its frames. Frames are
    allocated when the first block is looked for.

    Attributes:
        reader: of the disk. workspace: scratch memory for blocks and rows on their way. sizes: of rows, for kernels.
    """

    def __init__(self, schema: Schema, config: StoreConfig, reader: SpillReader, workspace: Workspace) -> None:
        self.schema = schema
        self.reader = reader
        self.workspace = workspace
        self.sizes = row_sizes(schema)
        self._config = config
        self._pool: BufferPool | None = None

    @property
    def frames(self) -> BufferPool:
        """The pool, made when it is first asked for; raises `FrameMemoryError`."""
        if self._pool is None:
            n_frames = self._config.pool_bytes // self.schema.block_bytes
            self._pool = BufferPool(n_frames, self.schema.block_bytes, policy=self._config.pool_policy)
        return self._pool

    @property
    def in_use(self) -> bool:
        """Whether the frames have been allocated."""
        return self._pool is not None

    def addresses(self, frames: IntArray) -> IntArray:
        """Return where the keys in frames begin, int64 [n]."""
        found: IntArray = self.frames.frame_addresses[frames]
        return found

    def limit(self, n_sequences: int) -> int:
        """Blocks that each of so many sequences, attended in turn, may let in a layer and step."""
        return admission_limit(self.frames.n_frames, self.schema.n_layers * n_sequences)

    def find(self, table: Table, numbers: IntArray) -> tuple[IntArray, PinGuard]:
        """Look blocks up: their frames, int64 [n], -1 for a miss, and a guard that keeps them there."""
        frames = self.frames.lookup(self._ids(table, numbers))
        return frames, self.frames.pin(frames)

    def reserve(
        self, numbers: IntArray, frames: IntArray, weights: npt.NDArray[np.float64], limit: int
    ) -> dict[int, int]:
        """Let in the heaviest blocks, at most `limit`, given with the frames found: return frames to fill by number.

        Those in the pool are touched. There are fewer frames where guards pin the rest.
        """
        best = best_first(weights, limit)
        self.frames.touch(frames[best[::-1]], weights[best[::-1]])  # the heaviest last: the most recent
        missing = numbers[best][frames[best] < 0][: self.frames.available()]
        reserved = self.frames.reserve(len(missing))
        assert reserved is not None, "there were as many a moment ago"
        return dict(zip(missing.tolist(), reserved.tolist(), strict=True))

    def fill(self, frame: int, data: Bytes) -> None:
        """Copy a block, uint8 [block bytes], into a reserved frame."""
        self.frames.frames[frame].numpy()[:] = data

    def commit(self, table: Table, reserved: dict[int, int]) -> tuple[IntArray, IntArray, PinGuard]:
        """Make filled frames visible; returns the blocks' numbers, their frames and a guard."""
        numbers, frames = np.array([*reserved], np.int64), np.array([*reserved.values()], np.int64)
        self.frames.commit(self._ids(table, numbers), frames)
        return numbers, frames, self.frames.pin(frames)

    def abort(self, reserved: dict[int, int]) -> None:
        """Give reserved frames back."""
        self.frames.abort([*reserved.values()])

    def counts(self) -> dict[str, int]:
        """Return what `StoreStats` says of the pool and the reading below it."""
        found = {"read_extents": self.reader.extents_read, "read_bytes": self.reader.bytes_read}
        if self._pool is None:
            return found
        stats, counters = self._pool.stats(), self._pool.counters
        return {
            **found,
            "pool_bytes": stats.allocated_bytes,
            "pool_blocks": stats.resident_blocks,
            "pool_lookups": counters.lookups,
            "pool_hits": counters.hits,
            "pool_evictions": counters.evictions,
            "pool_stalls": counters.stalls,
            "pool_pins": stats.pinned_frames,
        }

    def close(self) -> None:
        """Give the frames' memory back."""
        if self._pool is not None:
            self._pool.close()

    def _ids(self, table: Table, numbers: IntArray) -> IntArray:
        """Ids of blocks: the extent's generation, which no other save has, the layer, the block's number."""
        n_layers = self.schema.n_layers
        saves = np.array([self._generation(table, number) for number in numbers.tolist()], np.int64)
        return (saves * n_layers + table.layer << NUMBER_BITS) + numbers

    def _generation(self, table: Table, number: int) -> int:
        ref = table.extent(number)
        assert ref is not None, f"block {number} is in the heap"
        return ref.generation
