"""Which blocks of a sequence lie on the disk only when the heap is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.row_records import RowRecords
from kvstore.storage.catalog import CatalogEntry, ExtentRef

if TYPE_CHECKING:
    from kvstore.sequence import Sequence
    from kvstore.store import KVStore


class Moves:
    """Moves the oldest blocks first, in all layers alike, and never what every step reads: sinks, window and tail.

    A block moves once the extent that holds it is full and on the disk. So moved blocks are one range from the sinks
    on; what is asked for often comes up through the pool.
    """

    def __init__(self, store: KVStore, rows: RowRecords) -> None:
        self._store = store
        self._tokens = store.schema.block_tokens
        self._rows = rows

    def spill(self, seq: Sequence, n_blocks: int) -> int:
        """Give blocks of a sequence back to the heap, about n_blocks over all layers; returns how many."""
        movable = self._movable(seq)
        first = movable.start
        while first < movable.stop and seq._tables[0].extent(first) is not None:
            first += 1
        stop = min(movable.stop, first - (-n_blocks // len(seq._tables)))
        if stop > first:
            seq._indexes.cancel()  # work in the background may read what moves; the next commit begins it again
        extents = self._sound(seq)
        for table in seq._tables:
            table.spill(extents, first, stop)
        return max(0, stop - first) * len(seq._tables)

    def left_at_load(self, entry: CatalogEntry) -> range:
        """Return the blocks of a stored sequence to leave on the disk, so that the others fit into the heap."""
        heap, n_layers = self._store.heap, len(entry.layers)
        n_blocks = -(-entry.n_rows // self._tokens)
        room = heap.room_blocks
        if room is None or n_blocks * n_layers <= room:
            return range(0)
        covered = [entry.n_rows - self._store.config.window if ref is None else ref.stop_row for ref in entry.indexes]
        full = sum(ref.n_tokens == self._rows.blocks_per_extent * self._tokens for ref in entry.layers[0])
        first = self._first(entry.first_row)
        per_extent = self._rows.blocks_per_extent
        most = min(full * per_extent, max(0, min(covered)) // self._tokens // per_extent * per_extent)
        wanted = -(-(first + n_blocks - room // n_layers) // per_extent) * per_extent
        return range(first, min(wanted, most)) if first < min(wanted, most) else range(0)

    def fixed_blocks(self, seq: Sequence) -> int:
        """Blocks of a sequence that have to be in the heap, over all layers, when the others have been saved."""
        per_extent = self._rows.blocks_per_extent
        n_blocks = seq._tables[0].n_blocks
        if not seq.keep:
            return (n_blocks - seq._tables[0].n_spilled) * len(seq._tables)
        first = min(n_blocks, self._first(seq.first_row))
        stop = max(first, self._covered(seq) // self._tokens // per_extent * per_extent)
        return (first + n_blocks - stop) * len(seq._tables)

    def _movable(self, seq: Sequence) -> range:
        """Blocks that are on the disk and may leave the heap, or have left it."""
        saved = len(self._sound(seq)) * self._rows.blocks_per_extent
        first = self._first(seq.first_row)
        return range(first, max(first, min(saved, self._covered(seq) // self._tokens)))

    def _covered(self, seq: Sequence) -> int:
        """One past the last row that no query reads without having chosen it."""
        window_start = len(seq) - self._store.config.window
        return max(0, min(keeper.covered[1] if keeper.covered else window_start for keeper in seq._indexes))

    def _sound(self, seq: Sequence) -> tuple[ExtentRef, ...]:
        return seq._saved.sound_extents(self._tokens, self._rows.blocks_per_extent)

    def _first(self, first_row: int) -> int:
        """First block that holds no sink."""
        return -(-(first_row + self._store.config.sinks) // self._tokens)
