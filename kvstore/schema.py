"""What a store holds: the shape and type of the rows of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvstore.errors import ConfigError
from kvstore.index.rope import RopeSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Schema:
    """Shape, dtype and meaning of the rows of one model; frozen for the life of a store.

    Attributes:
        n_layers: tables a sequence has.
        n_q_heads, n_kv_heads: query heads and key/value heads; their quotient is the group (GQA).
        head_dim: numbers in a key; `value_dim` in a value (0 means head_dim).
        dtype: `"float32"`, `"float16"` or `"bfloat16"`; rows are kept bit for bit.
        block_tokens: rows of a block, a power of two.
        scale: softmax scale (0 means head_dim ** -0.5).
        rope: one RopeSpec (or None) a layer, or () when the keys' RoPE is not known.
        fingerprint: says which model the rows belong to.
    """

    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int = 0
    dtype: str = "float32"
    block_tokens: int = 64
    scale: float = 0.0
    rope: tuple[RopeSpec | None, ...] = field(default=())
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_q_heads", "n_kv_heads", "head_dim", "value_dim", "block_tokens"):
            size, least = getattr(self, name), 0 if name == "value_dim" else 1
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ConfigError(f"{name} must be at least {least} and an integer, not {size!r}")
        if not 0 <= self.scale < float("inf"):
            raise ConfigError(f"scale must be positive and finite, or 0 for head_dim ** -0.5, not {self.scale}")
        if self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(f"block_tokens must be a power of two, not {self.block_tokens}")
        if self.n_q_heads % self.n_kv_heads:
            raise ConfigError(f"{self.n_q_heads} query heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.rope and len(self.rope) != self.n_layers:
            raise ConfigError(f"rope must name every layer: {self.n_layers} layers, {len(self.rope)} entries")
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_q_heads // self.n_kv_heads

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of rows as torch names it."""
        return DTYPES[self.dtype]

    @property
    def key_bytes(self) -> int:
        """Bytes of one key of one head."""
        return self.head_dim * self.torch_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: block_tokens rows, all KV heads, keys and values."""
        return self.block_tokens * self.n_kv_heads * (self.head_dim + self.value_dim) * self.torch_dtype.itemsize
