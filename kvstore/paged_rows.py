"""The rows of a table that is partly on the disk, where kernels can read them, for the time of one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.buffer_pool import PinGuard
from kvstore.index.rows import RowView
from kvstore.kernels.copy import copy_rows
from kvstore.spill_pool import SpillPool
from kvstore.table import Rows, Table

PART_BYTES = 8 << 20
"""Blocks read at a time by whoever goes through all rows: enough for large reads, little beside the heap."""

IntArray = npt.NDArray[np.int64]


class PagedRows:
    """Stands in for a `Table` in kernels. Blocks may go when its context is left.

    A block on the disk is read where it lies in the pool. What is not there is read from the disk: of chosen rows
    copies are put into scratch blocks and known by ids behind those of the table, until the next `place`; ranges are
    brought part by part. Kernels see the same numbers in the same order as they would in the heap: results are the
    same bits.

    Attributes:
        key_addresses, value_addresses: as of the table, int64; 0 for a block that is not in place.
    """

    def __init__(self, table: Table, pool: SpillPool, limit: int, name: str = "") -> None:
        """`limit`: blocks that the pool may let in meanwhile. `name`: tells the scratch of several tables apart."""
        self._table = table
        self._pool = pool
        self._limit = limit
        self._name = name
        self._shift = pool.schema.block_tokens.bit_length() - 1
        self._value_offset = pool.schema.n_kv_heads * pool.schema.block_tokens * pool.schema.key_bytes
        self._n_blocks = table.n_blocks
        self.key_addresses = table.key_addresses[: self._n_blocks].copy()
        self.value_addresses = table.value_addresses[: self._n_blocks].copy()
        self._pins: list[PinGuard] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for pin in self._pins:
            pin.release()

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self._table.n_rows

    @property
    def address_tables(self) -> tuple[int, int]:
        """Where the two tables of addresses lie."""
        return self.key_addresses.ctypes.data, self.value_addresses.ctypes.data

    def key_view(self) -> RowView:
        """Return where the keys lie, for kernels that go through rows by `RowView.parts`."""
        return replace(self._table.key_view(), block_addresses=self.key_addresses, owner=self, bring=self.bring)

    def has(self, start: int, stop: int) -> bool:
        """Whether all rows of [start, stop) are in place."""
        return bool((self.key_addresses[self._blocks(start, stop)] != 0).all())

    def place(self, rows: Rows, *, values: bool = True) -> Rows:
        """Bring rows int64 [n_kv_heads, n] into place and return ids under which kernels find them, in this order.

        Without `values` the keys only. Raises what reading raises. O(n log n), and the extents read.
        """
        numbers = rows >> self._shift
        away = self.key_addresses[numbers] == 0
        if not away.any():
            return rows
        blocks, counts = np.unique(numbers[away], return_counts=True)
        frames = self._find(blocks)
        reserved = self._pool.reserve(blocks, frames, counts.astype(np.float64), self._limit)
        missing = blocks[frames < 0]
        try:
            away = np.isin(numbers, np.setdiff1d(missing, [*reserved]))
            homes = np.where(away, np.cumsum(away, axis=1) - 1, -1)
            self._read(missing, reserved, rows, homes, values)
        except BaseException:
            self._pool.abort(reserved)
            raise
        self._limit = 0  # once a call
        self._use(*self._pool.commit(self._table, reserved))
        return np.where(away, homes + (self._n_blocks << self._shift), rows)

    def bring(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges that make up [start, stop), the rows of each being in place until the next is asked for."""
        per_extent = self._pool.reader.blocks_per_extent
        step = per_extent * max(1, PART_BYTES // (per_extent * self._pool.schema.block_bytes)) << self._shift
        low = start
        while low < stop:
            high = min(stop, low - low % step + step)
            with self.hold((low, high)):
                yield low, high
            low = high

    @contextmanager
    def hold(self, *ranges: tuple[int, int]) -> Iterator[None]:
        """Keep the rows of ranges [start, stop) in place while the context is open; one at a time."""
        blocks = np.unique(np.concatenate([self._blocks(start, stop) for start, stop in ranges]))
        blocks = blocks[self.key_addresses[blocks] == 0]
        blocks = blocks[self._find(blocks) < 0]
        scratch = self._scratch("blocks", len(blocks))
        wanted = [(number, ref) for number in blocks.tolist() if (ref := self._table.extent(number)) is not None]
        for home, (_, data) in zip(scratch, self._pool.reader.blocks(self._table.layer, wanted), strict=True):
            home[:] = data
        self._set(blocks, scratch.ctypes.data + np.arange(len(blocks)) * self._pool.schema.block_bytes)
        try:
            yield
        finally:
            self._set(blocks, np.zeros(len(blocks), np.int64), 0)

    def _blocks(self, start: int, stop: int) -> IntArray:
        """Numbers of the blocks that hold the rows [start, stop)."""
        return np.arange(start >> self._shift, (max(start, stop - 1) >> self._shift) + 1)[: max(0, stop - start)]

    def _find(self, blocks: IntArray) -> IntArray:
        """Use what the pool has of these blocks; return their frames, -1 for what it has not."""
        frames, pin = self._pool.find(self._table, blocks)
        self._use(blocks[frames >= 0], frames[frames >= 0], pin)
        return frames

    def _use(self, blocks: IntArray, frames: IntArray, pin: PinGuard) -> None:
        self._pins.append(pin)
        self._set(blocks, self._pool.addresses(frames))

    def _read(self, blocks: IntArray, reserved: dict[int, int], rows: Rows, homes: Rows, values: bool) -> None:
        """Read the extents of blocks: into their frames, if reserved, else rows into their homes in scratch."""
        scratch = self._scratch("rows", (int(homes.max(initial=-1)) >> self._shift) + 1)
        order = np.argsort(rows, axis=1, kind="stable")
        ascending = np.take_along_axis(rows, order, 1)
        refs = (self._table.extent(number) for number in blocks.tolist())
        wanted = set(reserved)
        for ref, data in self._pool.reader.extents(self._table.layer, (ref for ref in refs if ref is not None)):
            for number in wanted.intersection(range(ref.number, ref.number + ref.n_blocks)):
                self._pool.fill(reserved[number], data[number - ref.number])
            first = ref.number << self._shift
            copy_rows(data, first, self._pool.sizes, ascending, order, homes, values, scratch)
        starts = scratch.ctypes.data + np.arange(len(scratch)) * self._pool.schema.block_bytes
        self.key_addresses = np.concatenate([self.key_addresses[: self._n_blocks], starts])
        self.value_addresses = np.concatenate([self.value_addresses[: self._n_blocks], starts + self._value_offset])

    def _scratch(self, what: str, n_blocks: int) -> npt.NDArray[np.uint8]:
        shape = (n_blocks, self._pool.schema.block_bytes)
        return self._pool.workspace.buffer(f"{what} from disk {self._name}", shape, np.uint8)

    def _set(self, blocks: IntArray, addresses: IntArray, offset: int | None = None) -> None:
        self.key_addresses[blocks] = addresses
        self.value_addresses[blocks] = addresses + (self._value_offset if offset is None else offset)


@contextmanager
def open_rows(tables: Sequence[Table], pool: SpillPool | None) -> Iterator[Sequence[Table | PagedRows]]:
    """Yield tables for kernels to read, those that are partly on the disk as `PagedRows`."""
    away = sum(table.n_spilled > 0 for table in tables)
    if pool is None or not away:
        yield tables
        return
    with ExitStack() as stack:
        limit = pool.limit(away)
        yield [
            stack.enter_context(PagedRows(table, pool, limit, str(i))) if table.n_spilled else table
            for i, table in enumerate(tables)
        ]
