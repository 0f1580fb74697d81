"""A table: the keys and values of one layer of one sequence; a row is a token."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvstore.heap import Block, Heap
from kvstore.index.rows import DTYPE_CODES, RowView
from kvstore.schema import Schema


class Table:
    """Append-only rows in blocks of a heap. Row ids are 0, 1, 2, ...; a row never moves and never changes.

    A table checks nothing: its sequence has done so.
    """

    __slots__ = ("_blocks", "_heap", "_key_addresses", "_schema", "_shift", "_value_addresses", "n_rows")

    def __init__(self, schema: Schema, heap: Heap) -> None:
        self._schema = schema
        self._heap = heap
        self._shift = schema.block_tokens.bit_length() - 1
        self._blocks: list[Block] = []
        self._key_addresses = np.zeros(16, np.int64)
        self._value_addresses = np.zeros(16, np.int64)
        self.n_rows = 0

    @property
    def n_blocks(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    @property
    def key_addresses(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where the keys of each block begin, int64 [>= n_blocks]; replaced by a longer array as the table grows."""
        return self._key_addresses

    @property
    def value_addresses(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The same for values."""
        return self._value_addresses

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy rows to the end: keys [n_kv_heads, n, head_dim], values [n_kv_heads, n, value_dim], any strides.

        Raises `HeapFullError`, with nothing changed, when there is no room.
        """
        n = keys.shape[1]
        self._make_room(self.n_rows + n)
        mask = self._schema.block_tokens - 1
        done = 0
        while done < n:
            at = self.n_rows + done
            start = at & mask
            take = min(n - done, mask + 1 - start)
            block = self._blocks[at >> self._shift]
            block.keys[:, start : start + take].copy_(keys[:, done : done + take])
            block.values[:, start : start + take].copy_(values[:, done : done + take])
            done += take
        self.n_rows += n

    def block(self, number: int) -> Block:
        """Return a block."""
        return self._blocks[number]

    def append_raw(self, raw: bytes | bytearray | memoryview, n_blocks: int, block_rows: int) -> None:
        """Append rows that are given as bytes: n_blocks times the keys [n_kv_heads, block_rows, head_dim], then values.

        The table must end with a full block. Raises `HeapFullError`, with nothing changed, when there is no room.
        """
        s = self._schema
        data = np.frombuffer(raw, np.uint8)
        self._make_room(self.n_rows + n_blocks * block_rows)
        n_bytes = len(data) // n_blocks
        for i in range(n_blocks):
            block, part = self._blocks[self.n_rows >> self._shift], data[i * n_bytes : (i + 1) * n_bytes]
            if block_rows == s.block_tokens:
                ctypes.memmove(block.key_address, part.ctypes.data, s.block_bytes)  # keys and values lie side by side
            else:
                keys, values = np.split(part.copy(), [s.n_kv_heads * block_rows * s.key_bytes])
                shape = (s.n_kv_heads, block_rows, -1)
                block.keys[:, :block_rows] = torch.from_numpy(keys).view(s.torch_dtype).view(shape)
                block.values[:, :block_rows] = torch.from_numpy(values).view(s.torch_dtype).view(shape)
            self.n_rows += block_rows

    def truncate(self, n_rows: int) -> None:
        """Forget the rows from n_rows on and give blocks that hold none back to the heap."""
        keep = -(-n_rows // self._schema.block_tokens)
        self._heap.free(self._blocks[keep:])
        del self._blocks[keep:]
        self.n_rows = min(self.n_rows, n_rows)

    def fork(self) -> Table:
        """Return a table with the same rows; blocks are shared until one of the two writes into its last one."""
        twin = Table(self._schema, self._heap)
        self._heap.share(self._blocks)
        twin._blocks = self._blocks[:]
        twin._key_addresses = self._key_addresses.copy()
        twin._value_addresses = self._value_addresses.copy()
        twin.n_rows = self.n_rows
        return twin

    def snapshot(self) -> Table:
        """Return a reader of the rows as they are now; it holds nothing: after a truncate it reads what came later."""
        twin = Table(self._schema, self._heap)
        twin._blocks, twin.n_rows = self._blocks[:], self.n_rows
        return twin

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the rows [start, stop): keys [n_kv_heads, n, head_dim] and values [n_kv_heads, n, value_dim]."""
        s = self._schema
        keys = torch.empty(s.n_kv_heads, stop - start, s.head_dim, dtype=s.torch_dtype)
        values = torch.empty(s.n_kv_heads, stop - start, s.value_dim, dtype=s.torch_dtype)
        mask = s.block_tokens - 1
        at = start
        while at < stop:
            lo = at & mask
            take = min(stop - at, mask + 1 - lo)
            block = self._blocks[at >> self._shift]
            keys[:, at - start : at - start + take] = block.keys[:, lo : lo + take]
            values[:, at - start : at - start + take] = block.values[:, lo : lo + take]
            at += take
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
        for number in sorted(set(numbers.tolist())):
            at = (numbers == number).nonzero()[:, 0]
            block = self._blocks[number]
            keys[at] = block.keys[head, rows[at] & mask]
            values[at] = block.values[head, rows[at] & mask]
        return keys, values

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
        own_last = n_rows > self.n_rows and is_open and self._heap.is_shared(self._blocks[-1])
        fresh = self._heap.allocate(max(0, need) + own_last)
        if own_last:
            self._replace_last(fresh.pop())
        for block in fresh:
            self._hold(block)

    def _replace_last(self, block: Block) -> None:
        shared = self._blocks.pop()
        block.keys.copy_(shared.keys)
        block.values.copy_(shared.values)
        self._heap.free([shared])
        self._hold(block)

    def _hold(self, block: Block) -> None:
        i = len(self._blocks)
        if i == len(self._key_addresses):
            self._key_addresses = np.concatenate([self._key_addresses, np.zeros(i, np.int64)])
            self._value_addresses = np.concatenate([self._value_addresses, np.zeros(i, np.int64)])
        self._key_addresses[i] = block.key_address
        self._value_addresses[i] = block.value_address
        self._blocks.append(block)

    def _check(self) -> None:
        """Assert the invariants: just enough blocks, and addresses that are theirs."""
        assert len(self._blocks) == -(-self.n_rows // self._schema.block_tokens)
        for i, block in enumerate(self._blocks):
            assert self._key_addresses[i] == block.key_address == block.keys.data_ptr()
            assert self._value_addresses[i] == block.value_address == block.values.data_ptr()
