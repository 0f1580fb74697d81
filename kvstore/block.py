"""A block of rows in host memory."""

from __future__ import annotations

import torch

from kvstore.schema import Schema


class Block:
    """Room for `block_tokens` consecutive rows of one table, all KV heads.

    Keys and values lie side by side. Tensors of them are made when they are first asked for: kernels, and what comes
    from the disk, go by addresses, and four views for each of thousands of blocks are a tenth of a second.

    Attributes:
        key_address, value_address: where the two begin.
    """

    __slots__ = ("_arena", "_keys", "_schema", "_start", "_values", "key_address", "value_address")

    def __init__(self, schema: Schema, arena: torch.Tensor, start: int) -> None:
        """The block lies in an arena, uint8 [n], from byte `start` on."""
        self._schema = schema
        self._arena = arena
        self._start = start
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.key_address: int = arena.data_ptr() + start
        self.value_address: int = self.key_address + schema.n_kv_heads * schema.block_tokens * schema.key_bytes

    @property
    def keys(self) -> torch.Tensor:
        """Schema dtype [n_kv_heads, block_tokens, head_dim], contiguous, a view of the arena."""
        if self._keys is None:
            self._keys = self._view(self.key_address, self._schema.head_dim)
        return self._keys

    @property
    def values(self) -> torch.Tensor:
        """Schema dtype [n_kv_heads, block_tokens, value_dim], the same."""
        if self._values is None:
            self._values = self._view(self.value_address, self._schema.value_dim)
        return self._values

    def copy(self) -> Block:
        """Return a block with the same rows in memory of its own, outside of every heap."""
        return Block(self._schema, self._arena[self._start : self._start + self._schema.block_bytes].clone(), 0)

    def _view(self, address: int, dim: int) -> torch.Tensor:
        s = self._schema
        start = self._start + address - self.key_address
        stop = start + s.n_kv_heads * s.block_tokens * dim * s.torch_dtype.itemsize
        return self._arena[start:stop].view(s.torch_dtype).view(s.n_kv_heads, s.block_tokens, dim)
