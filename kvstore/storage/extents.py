"""Cutting tables into extents: several blocks a record, so that a record is large enough for the disk."""

from __future__ import annotations

from kvstore.errors import ConfigError
from kvstore.storage.record import MAX_PAYLOAD_BYTES

EXTENT_BYTES = 256 << 10


def blocks_per_extent(block_bytes: int, extent_bytes: int = EXTENT_BYTES) -> int:
    """Return the fewest blocks with at least `extent_bytes` together; raises `ConfigError` if a block is too large.

    >>> blocks_per_extent(65536), blocks_per_extent(100_000), blocks_per_extent(1 << 20)
    (4, 3, 1)
    """
    if not 0 < block_bytes <= MAX_PAYLOAD_BYTES:
        raise ConfigError(f"a block of {block_bytes} bytes fits no record of {MAX_PAYLOAD_BYTES}; lower block_tokens")
    return max(1, min(-(-extent_bytes // block_bytes), MAX_PAYLOAD_BYTES // block_bytes))


def cut_extents(start: int, stop: int, n_blocks: int) -> list[range]:
    """Return the extents that hold blocks [start, stop), each from a multiple of n_blocks on; the last may be short.

    The first begins where its extent does, so that a short extent written before is replaced by a longer one.

    >>> cut_extents(5, 9, 4)
    [range(4, 8), range(8, 9)]
    """
    first = start - start % n_blocks
    return [range(at, min(at + n_blocks, stop)) for at in range(first, stop, n_blocks)] if start < stop else []
