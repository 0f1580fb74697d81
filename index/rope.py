"""Rotary position embeddings: what they do to a key, and how to undo it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError


@dataclass(frozen=True)
class RopeSpec:
    """The rotary position embedding that one layer's keys carry (RoFormer, arXiv 2104.09864, eq. 34).

    Attributes:
        inv_freq: angle a position for each rotated pair, radians, [n_pairs]; scalings (linear, llama3, yarn)
            are already in it. `2 * n_pairs` is the rotary dimension; dimensions after it are not rotated.
        layout: `"half"` pairs dimension i with i + n_pairs (Llama, Qwen); `"interleaved"` pairs 2i with
            2i + 1 (GPT-J).
        attention_factor: factor on cos and sin (yarn's temperature), so on the length of a rotated key.
    """

    inv_freq: tuple[float, ...]
    layout: str = "half"
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.layout not in ("half", "interleaved"):
            raise ConfigError(f"layout must be 'half' or 'interleaved', not {self.layout!r}")
        if not self.inv_freq or not np.isfinite(self.inv_freq).all():
            raise ConfigError("inv_freq must hold one finite angle a pair")

    @classmethod
    def from_theta(cls, theta: float, rotary_dim: int, layout: str = "half") -> RopeSpec:
        """Plain RoPE: inv_freq[i] = theta ** (-2 i / rotary_dim)."""
        if rotary_dim % 2 or rotary_dim <= 0:
            raise ConfigError(f"rotary_dim must be even and positive, not {rotary_dim}")
        return cls(tuple(float(theta ** (-i / rotary_dim)) for i in range(0, rotary_dim, 2)), layout)

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions that are rotated."""
        return 2 * len(self.inv_freq)
