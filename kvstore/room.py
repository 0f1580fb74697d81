"""How many rows a store has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvstore.schema import Schema


@dataclass(frozen=True, slots=True)
class Room:
    """What a scheduler asks before it admits a request; every tier counts.

    Attributes:
        step_rows: rows that the steps open at one time may bring together: these, and what every query reads of the
            sequences in use, must be in the heap. None: no limit.
        rows: rows that can be kept on top of those there are, whatever tier they end up in. None: no limit.
    """

    step_rows: int | None
    rows: int | None

    @classmethod
    def of(cls, schema: Schema, limit_blocks: int | None, fixed_blocks: int, disk_blocks: int | None) -> Self:
        """Room in a heap of so many blocks, some of which cannot move, above a disk that takes so many more.

        disk_blocks: None where there is no disk, so that everything has to stay in the heap.
        """
        heap_blocks = None if limit_blocks is None else max(0, limit_blocks - fixed_blocks)
        step_rows, disk_rows = (
            None if blocks is None else blocks // schema.n_layers * schema.block_tokens
            for blocks in (heap_blocks, disk_blocks)
        )
        return cls(step_rows, step_rows if disk_blocks is None else disk_rows)
