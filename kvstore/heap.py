"""The heap: the tier in host memory where blocks are born."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvstore.advice import HUGE_PAGES, adviser
from kvstore.block import Block
from kvstore.errors import HeapFullError
from kvstore.prefault import prefault
from kvstore.schema import Schema

ALIGN_BYTES = 64  # a cache line
LEAST_HUGE_BYTES = 4 << 20  # what is smaller may lie in memory that others will use again


@dataclass(slots=True)
class _Arena:
    """Memory of which the bytes [next, stop) have not been cut into blocks yet."""

    room: torch.Tensor
    next: int
    stop: int


class Heap:
    """Preallocated arenas cut into blocks; a block that is freed is handed out again.

    Memory is taken from the system one arena at a time and given back when the heap is closed, so nothing is ever
    copied to make room. Pinned when CUDA is there, so that copies to a device can be asynchronous.
    """

    def __init__(self, schema: Schema, arena_bytes: int, limit_bytes: int = 0, *, huge_pages: bool = True) -> None:
        self._schema = schema
        self._advise = adviser() if huge_pages else None
        self._stride_bytes = -(-schema.block_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._arena_blocks = max(1, arena_bytes // self._stride_bytes)
        self._limit_blocks = limit_bytes // self._stride_bytes if limit_bytes else None
        self._limit_bytes = limit_bytes
        self._arenas: list[torch.Tensor] = []
        self._uncut: list[_Arena] = []
        self._n_uncut = 0
        self._free: list[Block] = []
        self._extra_holders: dict[int, int] = {}  # address of a shared block -> holders beyond the first
        self._n_blocks = 0
        self.when_full: Callable[[int], None] | None = None  # is asked to free room for so many blocks

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes, padding to a cache line included."""
        return self._stride_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system."""
        return self._n_blocks * self._stride_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that are handed out."""
        return self.used_blocks * self._stride_bytes

    @property
    def used_blocks(self) -> int:
        """Blocks that are handed out."""
        return self._n_blocks - len(self._free) - self._n_uncut

    def allocate(self, n_blocks: int) -> list[Block]:
        """Hand out n_blocks blocks with undefined contents, or none of them.

        Raises `HeapFullError` when the byte limit leaves too little room; nothing is allocated then.
        """
        self.prepare(n_blocks)
        return [self._free.pop() if self._free else self._cut_next() for _ in range(n_blocks)]

    def prepare(self, n_blocks: int) -> None:
        """Have memory for n_blocks blocks, so that `allocate` cannot fail; raises what that would raise."""
        if self.when_full is not None and not self.has_room(n_blocks):
            self.when_full(n_blocks)
        if not self.has_room(n_blocks):
            raise HeapFullError(
                f"the heap needs {n_blocks} more blocks of {self._stride_bytes} bytes, but {self.used_bytes} of its "
                f"{self._limit_bytes} bytes are used; drop a sequence, bring fewer rows a step, or raise heap_bytes"
            )
        self._reserve(n_blocks - len(self._free) - self._n_uncut)

    def prefault(self, n_blocks: int) -> None:
        """`prepare` for blocks that are filled at once: a thread has their memory cleared meanwhile."""
        self.prepare(n_blocks)
        wanted_bytes, pieces = (n_blocks - len(self._free)) * self._stride_bytes, []
        for arena in self._uncut:
            stop = min(arena.stop, arena.next + max(0, wanted_bytes))
            pieces.append((arena.room, arena.next, stop))
            wanted_bytes -= stop - arena.next
        prefault([piece for piece in pieces if piece[1] < piece[2]])

    @property
    def limit_blocks(self) -> int | None:
        """Blocks that the byte limit allows; None without one."""
        return self._limit_blocks

    @property
    def room_blocks(self) -> int | None:
        """Blocks that can still be handed out; None without a limit."""
        return None if self._limit_blocks is None else self._limit_blocks - self.used_blocks

    def has_room(self, n_blocks: int) -> bool:
        """Whether `allocate` would succeed."""
        return self.room_blocks is None or n_blocks <= self.room_blocks

    def share(self, blocks: list[Block]) -> None:
        """Count one holder more for each block; it is free when every holder has freed it."""
        for block in blocks:
            self._extra_holders[block.key_address] = self._extra_holders.get(block.key_address, 0) + 1

    def is_shared(self, block: Block) -> bool:
        """Whether somebody else holds this block too, so that its rows must not be written over."""
        return block.key_address in self._extra_holders

    def free(self, blocks: list[Block]) -> None:
        """Give up blocks; the caller must hold no view of them. They are reused once nobody holds them."""
        for block in reversed(blocks):
            others = self._extra_holders.pop(block.key_address, 0)
            if others == 0:
                self._free.append(block)
            elif others > 1:
                self._extra_holders[block.key_address] = others - 1

    def close(self) -> None:
        """Give all memory back to the system."""
        self._free.clear()
        self._uncut.clear()
        self._arenas.clear()
        self._extra_holders.clear()
        self._n_blocks = self._n_uncut = 0

    def _reserve(self, missing: int) -> None:
        while missing > 0:
            room = self._limit_blocks - self._n_blocks if self._limit_blocks is not None else self._arena_blocks
            n = min(self._arena_blocks, room)
            self._add_arena(n)
            missing -= n

    def _add_arena(self, n_blocks: int) -> None:
        n_bytes = n_blocks * self._stride_bytes + ALIGN_BYTES
        arena = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        if self._advise is not None and n_bytes >= LEAST_HUGE_BYTES:
            self._advise(arena.data_ptr(), arena.data_ptr() + n_bytes, HUGE_PAGES)
        first = -arena.data_ptr() % ALIGN_BYTES
        self._arenas.append(arena)
        self._n_blocks += n_blocks
        # Blocks are cut when they are first used: a small store should not pay for a whole arena.
        self._uncut.append(_Arena(arena, first, first + n_blocks * self._stride_bytes))
        self._n_uncut += n_blocks

    def _cut_next(self) -> Block:
        arena = self._uncut[0]
        block = Block(self._schema, arena.room, arena.next)
        arena.next += self._stride_bytes
        if arena.next == arena.stop:
            del self._uncut[0]
        self._n_uncut -= 1
        return block

    def _check(self) -> None:
        """Assert the invariants: no block is free twice, and the counts agree with a recount."""
        addresses = [b.key_address for b in self._free]
        assert len(set(addresses)) == len(addresses), "a block is free twice"
        assert not set(addresses) & set(self._extra_holders), "a shared block is free"
        assert 0 <= len(self._free) + self._n_uncut <= self._n_blocks
        assert self._limit_blocks is None or self._n_blocks <= self._limit_blocks
