"""The shape of the rows in a record."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.errors import ConfigError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class RowShape(NamedTuple):
    """Rows of `n_blocks` consecutive blocks of one table, all KV heads, keys and values.

    Raw bytes are, block after block, the keys [n_heads, block_rows, key_dim] and then the values
    [n_heads, block_rows, value_dim], C-order, little-endian, bfloat16 as its 16 bits; block_rows = n_tokens / n_blocks,
    so a block that is not full is an extent of its own.

    >>> RowShape("float16", n_blocks=2, n_tokens=128, n_heads=8, key_dim=64, value_dim=64).raw_bytes
    262144
    """

    dtype: str
    n_blocks: int
    n_tokens: int
    n_heads: int
    key_dim: int
    value_dim: int

    @property
    def block_rows(self) -> int:
        """Rows that each block holds."""
        return self.n_tokens // self.n_blocks

    @property
    def n_vectors(self) -> int:
        """Keys, and as many values, in the record."""
        return self.n_tokens * self.n_heads

    @property
    def raw_bytes(self) -> int:
        """Bytes of the rows as they are."""
        return self.n_vectors * (self.key_dim + self.value_dim) * ITEM_BYTES[self.dtype]

    def check(self) -> None:
        """Raise `ConfigError` unless every size is positive, below 2**32, and blocks are equally full."""
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(ITEM_BYTES)}, not {self.dtype!r}")
        for name, size in zip(self._fields[1:], self[1:], strict=True):
            if type(size) is not int or not 0 < size < 1 << 32:
                raise ConfigError(f"{name} of a record must be an integer in 1 .. 2**32 - 1, not {size!r}")
        if self.n_tokens % self.n_blocks:
            raise ConfigError(f"{self.n_tokens} rows do not fill {self.n_blocks} blocks equally; split the extent")
