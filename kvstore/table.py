"""A table: the keys and values of one layer of one sequence; a row is a token."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from kvstore.block import Block
from kvstore.heap import Heap
from kvstore.index.rows import DTYPE_CODES, RowView
from kvstore.new_rows import NewRows
from kvstore.schema import Schema
from kvstore.spill_reader import Bytes, SpillReader
from kvstore.storage.catalog import ExtentRef

Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Addresses = np.ndarray[tuple[int], np.dtype[np.int64]]


class Table:
    """Append-only rows in blocks. Row ids are 0, 1, 2, ...; a row keeps its id and never changes.

    A block is in the heap, or on the disk only: then the extent that holds it stands in its place, whole, full and
    valid to its end, and its address is 0. Kernels that may meet such blocks go through `kvstore.paged_rows`.
    A table checks nothing: its sequence has done so.

    Attributes:
        address_tables: where `key_addresses` and `value_addresses` lie.
    """

    __slots__ = (
        "_blocks", "_heap", "_key_addresses", "_schema", "_shift", "_value_addresses", "address_tables", "below",
        "layer", "n_rows", "n_spilled",
    )  # fmt: skip

    def __init__(self, schema: Schema, heap: Heap, layer: int = 0, below: SpillReader | None = None) -> None:
        self._schema = schema
        self._heap = heap
        self._shift = schema.block_tokens.bit_length() - 1
        self._blocks: list[Block | ExtentRef] = []
        self._take_addresses(np.zeros(16, np.int64), np.zeros(16, np.int64))
        self.layer = layer
        self.below = below
        self.n_rows = 0
        self.n_spilled = 0

    @property
    def n_blocks(self) -> int:
        """Blocks that hold rows, wherever they are."""
        return len(self._blocks)

    @property
    def key_addresses(self) -> Addresses:
        """Where the keys of each block begin, int64 [>= n_blocks]; replaced by a longer array as the table grows."""
        return self._key_addresses

    @property
    def value_addresses(self) -> Addresses:
        """The same for values."""
        return self._value_addresses

    def append(self, rows: NewRows, place: int = 0) -> None:
        """Copy the rows of one sequence to the end; `place` is its number among those that they are of.

        Raises `HeapFullError`, with nothing changed, when there is no room.
        """
        n = rows.n
        self._make_room(self.n_rows + n)
        mask = self._schema.block_tokens - 1
        keys, values = (None, None) if rows.few else rows.tensors(place)
        done = 0
        while done < n:
            at = self.n_rows + done
            start = at & mask
            take = min(n - done, mask + 1 - start)
            block = self.block(at >> self._shift)
            if keys is None or values is None:
                rows.copy_few(place, done, take, start, block.key_address, block.value_address)
            else:
                block.keys[:, start : start + take].copy_(keys[:, done : done + take])
                block.values[:, start : start + take].copy_(values[:, done : done + take])
            done += take
        self.n_rows += n

    def block(self, number: int) -> Block:
        """Return a block that is in the heap."""
        block = self._blocks[number]
        assert isinstance(block, Block), f"block {number} of layer {self.layer} is on the disk only"
        return block

    def extent(self, number: int) -> ExtentRef | None:
        """Return the extent that stands for a block, None for one in the heap."""
        block = self._blocks[number]
        return None if isinstance(block, Block) else block

    def heap_blocks(self) -> list[Block]:
        """Return the blocks that are in the heap."""
        return [block for block in self._blocks if isinstance(block, Block)]

    # ---- blocks that move ----

    def spill(self, extents: Iterable[ExtentRef], start: int, stop: int) -> None:
        """Give the blocks [start, stop) back to the heap; these extents, which are on the disk, stand for them."""
        for ref in extents:
            for number in range(max(start, ref.number), min(stop, ref.number + ref.n_blocks)):
                block = self._blocks[number]
                if isinstance(block, Block):
                    self._heap.free([block])
                    self._set(number, ref)

    def append_spilled(self, ref: ExtentRef) -> None:
        """Append the rows of an extent without reading them; the table must end where the extent begins."""
        for _ in range(ref.n_blocks):
            self._hold(ref)
        self.n_rows += ref.n_tokens

    def bring_back(self, numbers: Iterable[int]) -> None:
        """Read blocks into the heap, all or none; raises `HeapFullError` or what reading raises."""
        self.put_back(self.read_blocks(numbers))

    def read_blocks(self, numbers: Iterable[int]) -> list[tuple[int, Bytes]]:
        """Return copies of those of the blocks that lie on the disk only: number and uint8 [block bytes]."""
        wanted = [(number, ref) for number in numbers if (ref := self.extent(number)) is not None]
        return [(number, data.copy()) for number, data in self._reader.blocks(self.layer, wanted)] if wanted else []

    def put_back(self, blocks: list[tuple[int, Bytes]]) -> None:
        """Put what `read_blocks` has read into the heap, all or nothing; raises `HeapFullError`."""
        for (number, data), block in zip(blocks, self._heap.allocate(len(blocks)), strict=True):
            ctypes.memmove(block.key_address, data.ctypes.data, self._schema.block_bytes)
            self._set(number, block)

    def cut_blocks(self, n_rows: int) -> list[int]:
        """Blocks on the disk only that a truncate to n_rows leaves in an extent which is not valid to its end then."""
        tokens = self._schema.block_tokens
        found = [(number, self.extent(number)) for number in range(-(-n_rows // tokens))] if self.n_spilled else []
        return [number for number, ref in found if ref is not None and (ref.number + ref.n_blocks) * tokens > n_rows]

    def freed_by(self, n_rows: int) -> int:
        """Blocks that a truncate to n_rows gives back to the heap, those that nobody shares."""
        keep = -(-n_rows // self._schema.block_tokens)
        return sum(isinstance(b, Block) and not self._heap.is_shared(b) for b in self._blocks[keep:])

    @property
    def _reader(self) -> SpillReader:
        assert self.below is not None, "a table in memory has no disk"
        return self.below

    def _set(self, number: int, block: Block | ExtentRef) -> None:
        self.n_spilled += isinstance(self._blocks[number], Block) - isinstance(block, Block)
        self._blocks[number] = block
        self._key_addresses[number] = block.key_address if isinstance(block, Block) else 0
        self._value_addresses[number] = block.value_address if isinstance(block, Block) else 0

    # ---- rows ----

    def append_raw(self, raw: bytes | bytearray | memoryview, n_blocks: int, block_rows: int) -> None:
        """Append rows that are given as bytes: n_blocks times the keys [n_kv_heads, block_rows, head_dim], then values.

        The table must end with a full block. Raises `HeapFullError`, with nothing changed, when there is no room.
        """
        s = self._schema
        data = np.frombuffer(raw, np.uint8)
        self._make_room(self.n_rows + n_blocks * block_rows)
        n_bytes = len(data) // n_blocks
        for i in range(n_blocks):
            block, part = self.block(self.n_rows >> self._shift), data[i * n_bytes : (i + 1) * n_bytes]
            if block_rows == s.block_tokens:
                ctypes.memmove(block.key_address, part.ctypes.data, s.block_bytes)  # keys and values lie side by side
            else:
                keys, values = np.split(part.copy(), [s.n_kv_heads * block_rows * s.key_bytes])
                shape = (s.n_kv_heads, block_rows, -1)
                block.keys[:, :block_rows] = torch.from_numpy(keys).view(s.torch_dtype).view(shape)
                block.values[:, :block_rows] = torch.from_numpy(values).view(s.torch_dtype).view(shape)
            self.n_rows += block_rows

    def truncate(self, n_rows: int) -> None:
        """Forget the rows from n_rows on and give blocks that hold none back; what `cut_blocks` says must come back."""
        keep = -(-n_rows // self._schema.block_tokens)
        held = [block for block in self._blocks[keep:] if isinstance(block, Block)]
        self._heap.free(held)
        self.n_spilled -= len(self._blocks[keep:]) - len(held)
        del self._blocks[keep:]
        self.n_rows = min(self.n_rows, n_rows)

    def fork(self) -> Table:
        """Return a table with the same rows; blocks are shared until one of the two writes into its last one."""
        twin = Table(self._schema, self._heap, self.layer, self.below)
        self._heap.share(self.heap_blocks())
        twin._blocks = self._blocks[:]
        twin._take_addresses(self._key_addresses.copy(), self._value_addresses.copy())
        twin.n_rows, twin.n_spilled = self.n_rows, self.n_spilled
        return twin

    def snapshot(self) -> Table:
        """Return a reader of the rows as they are now, for any thread.

        It holds nothing: once blocks have been truncated or spilled it reads what came to their place. The keys of the
        last block are copied if it has room left: the table leaves a shared one when it grows, and whoever shared it
        may give it back.
        """
        twin = Table(self._schema, self._heap, self.layer, self.below)
        twin._blocks, twin.n_rows, twin.n_spilled = self._blocks[:], self.n_rows, self.n_spilled
        if self.n_rows & (self._schema.block_tokens - 1):
            twin._blocks[-1] = self.block(-1).copy()
        return twin

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the rows [start, stop): keys [n_kv_heads, n, head_dim] and values [n_kv_heads, n, value_dim]."""
        s = self._schema
        keys = torch.empty(s.n_kv_heads, stop - start, s.head_dim, dtype=s.torch_dtype)
        values = torch.empty(s.n_kv_heads, stop - start, s.value_dim, dtype=s.torch_dtype)
        for number, block_keys, block_values in self._open(range(start >> self._shift, -(-stop // s.block_tokens))):
            first = number << self._shift
            low, high = max(start, first), min(stop, first + s.block_tokens)
            keys[:, low - start : high - start] = block_keys[:, low - first : high - first]
            values[:, low - start : high - start] = block_values[:, low - first : high - first]
        return keys, values

    def read_keys(self, start: int, stop: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.float32]]:
        """Copy the keys of [start, stop) as float32 [n_kv_heads, n, head_dim], the form an index takes."""
        return self.read(start, stop)[0].float().numpy()

    def gather(self, head: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows of one KV head, in the order given: keys [n, head_dim] and values [n, value_dim]."""
        s = self._schema
        keys = torch.empty(len(rows), s.head_dim, dtype=s.torch_dtype)
        values = torch.empty(len(rows), s.value_dim, dtype=s.torch_dtype)
        mask = s.block_tokens - 1
        numbers = rows >> self._shift
        for number, block_keys, block_values in self._open(sorted(set(numbers.tolist()))):
            at = (numbers == number).nonzero()[:, 0]
            keys[at] = block_keys[head, rows[at] & mask]
            values[at] = block_values[head, rows[at] & mask]
        return keys, values

    def _open(self, numbers: Iterable[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the number, keys and values of blocks given ascending; those from the disk until the next is asked."""
        wanted = list(numbers)
        for number in wanted:
            block = self._blocks[number]
            if isinstance(block, Block):
                yield number, block.keys, block.values
        if self.n_spilled:
            spilled = [(number, ref) for number in wanted if (ref := self.extent(number)) is not None]
            for number, data in self._reader.blocks(self.layer, spilled):
                yield number, *self._parts(data)

    def _parts(self, data: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """View the bytes of a block as its keys and values."""
        s = self._schema
        keys, values = np.split(data, [s.n_kv_heads * s.block_tokens * s.key_bytes])
        shape = (s.n_kv_heads, s.block_tokens, -1)
        both = (torch.from_numpy(part).view(s.torch_dtype).view(shape) for part in (keys, values))
        return next(both), next(both)

    def place(self, rows: Rows, *, values: bool = True) -> Rows:
        """Return ids under which kernels find these rows, int64 [n_kv_heads, n]: their own, all being in the heap."""
        return rows

    def key_view(self) -> RowView:
        """Return where the keys lie, for kernels; valid until the next truncate."""
        s = self._schema
        return RowView(
            block_addresses=self._key_addresses,
            n_rows=self.n_rows,
            n_kv_heads=s.n_kv_heads,
            head_dim=s.head_dim,
            block_tokens=s.block_tokens,
            head_stride_bytes=s.block_tokens * s.key_bytes,
            row_stride_bytes=s.key_bytes,
            dtype_code=DTYPE_CODES[s.dtype],
            owner=self,
        )

    def _make_room(self, n_rows: int) -> None:
        need = -(-n_rows // self._schema.block_tokens) - len(self._blocks)
        is_open = self.n_rows & (self._schema.block_tokens - 1) != 0
        own_last = n_rows > self.n_rows and is_open and self._heap.is_shared(self.block(-1))
        fresh = self._heap.allocate(max(0, need) + own_last)
        if own_last:
            self._replace_last(fresh.pop())
        for block in fresh:
            self._hold(block)

    def _take_addresses(self, keys: Addresses, values: Addresses) -> None:
        """Take arrays for the blocks' addresses, and note where they lie: numpy takes microseconds to say so."""
        self._key_addresses, self._value_addresses = keys, values
        self.address_tables = (keys.ctypes.data, values.ctypes.data)

    def _replace_last(self, block: Block) -> None:
        shared = self.block(-1)
        block.keys.copy_(shared.keys)
        block.values.copy_(shared.values)
        self._heap.free([shared])
        self._set(self.n_blocks - 1, block)

    def _hold(self, block: Block | ExtentRef) -> None:
        i = len(self._blocks)
        if i == len(self._key_addresses):
            room = np.zeros(i, np.int64)
            self._take_addresses(*(np.concatenate([old, room]) for old in (self._key_addresses, self._value_addresses)))
        self._blocks.append(block)
        self.n_spilled += not isinstance(block, Block)
        self._key_addresses[i] = block.key_address if isinstance(block, Block) else 0
        self._value_addresses[i] = block.value_address if isinstance(block, Block) else 0

    def _check(self) -> None:
        """Assert the invariants: just enough blocks, addresses that are theirs, and whole extents for those on disk."""
        assert len(self._blocks) == -(-self.n_rows // self._schema.block_tokens)
        for i, block in enumerate(self._blocks):
            if isinstance(block, Block):
                assert self._key_addresses[i] == block.key_address == block.keys.data_ptr()
                assert self._value_addresses[i] == block.value_address == block.values.data_ptr()
            else:
                assert self._key_addresses[i] == self._value_addresses[i] == 0
                assert block.number <= i < block.number + block.n_blocks
                assert (block.number + block.n_blocks) * self._schema.block_tokens <= self.n_rows
        assert self.n_spilled == sum(not isinstance(block, Block) for block in self._blocks)
