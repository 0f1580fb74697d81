"""What a store holds: the shape and type of the rows of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kvstore.errors import ConfigError
from kvstore.index.rope import RopeSpec
from kvstore.partition import equal_share, near_equal_range

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
        fingerprint: says which model the rows belong to, and which part of it where they are not the whole.
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
    def value_bytes(self) -> int:
        """Bytes of one value of one head."""
        return self.value_dim * self.torch_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: block_tokens rows, all KV heads, keys and values."""
        return self.block_tokens * self.n_kv_heads * (self.head_dim + self.value_dim) * self.torch_dtype.itemsize

    def kv_heads(self, rank: int, world: int) -> slice:
        """KV heads of a rank under tensor parallelism, for keys and values [n_kv_heads, ...]; see `shard`."""
        return equal_share("KV heads", self.n_kv_heads, rank, world)

    def q_heads(self, rank: int, world: int) -> slice:
        """Query heads that share the KV heads of a rank, for q [n_q_heads, ...]; see `shard`."""
        heads = self.kv_heads(rank, world)
        return slice(heads.start * self.group, heads.stop * self.group)

    def layers(self, rank: int, world: int) -> range:
        """Layers of a rank under pipeline parallelism by their numbers in this schema; see `stage`."""
        return near_equal_range("layers", self.n_layers, rank, world)

    def shard(self, rank: int, world: int) -> Schema:
        """Return the schema of a rank's KV heads and their query heads, all layers: tensor parallelism.

        The rank's store gives, bit for bit, what the whole one gives for these heads. Heads count from 0 in it; the
        fingerprint says which they are, so that a directory is never taken for another rank's. Raises `ConfigError`
        unless the world divides the KV heads.
        """
        heads = self.kv_heads(rank, world)
        if world == 1:
            return self
        part = self._part("KV heads", heads.start, heads.stop, self.n_kv_heads)
        n_kv_heads = heads.stop - heads.start
        return replace(self, n_kv_heads=n_kv_heads, n_q_heads=n_kv_heads * self.group, fingerprint=part)

    def stage(self, rank: int, world: int) -> Schema:
        """Return the schema of a rank's layers, all heads: pipeline parallelism.

        Layer i of the rank's store is the model's layer `layers(rank, world)[i]`; the fingerprint names them. Raises
        `ConfigError` when there are more ranks than layers.
        """
        layers = self.layers(rank, world)
        if world == 1:
            return self
        part = self._part("layers", layers.start, layers.stop, self.n_layers)
        return replace(self, n_layers=len(layers), rope=self.rope[layers.start : layers.stop], fingerprint=part)

    def _part(self, what: str, start: int, stop: int, n: int) -> str:
        return f"{self.fingerprint} [{what} {start} to {stop - 1} of {n}]".lstrip()
