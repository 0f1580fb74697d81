"""How a key is cut into sub-spaces, and how their codes are packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.index.rope import RopeSpec

MAX_BITS = 8


@dataclass(frozen=True)
class Layout:
    """The sub-spaces of a product quantizer and the words that hold their codes.

    Keys are *arranged* before they are cut: dimension `order[i]` of a key becomes dimension i, and sub-space j is
    the j-th of m equal parts. With `paired`, a part holds whole RoPE pairs: their first halves, then their second.

    A word holds `per_word` codes, the first in its lowest bits: up to 4 bits as many as fit a byte; of 5 or 6 bits
    two, so that a key costs one table look-up instead of two; else one a byte. Rows are kept in whole bytes, or, where
    a word has 9 to 12 bits (`packable`), in 12 bits each: 2 x 6 bits take 1.5 bytes, 2 x 5 too; of 3 bits two share a
    byte, and 7 bits take one.
    """

    head_dim: int
    m: int
    bits: int
    paired: bool
    order: tuple[int, ...]

    @classmethod
    def of(cls, head_dim: int, m: int, bits: int, paired: bool, rope: RopeSpec | None) -> Layout:
        """Return the layout; raises `ConfigError` when sub-spaces do not come out equal."""
        if head_dim < 1 or m < 1 or not 1 <= bits <= MAX_BITS:
            raise ConfigError(f"need head_dim, m >= 1 and 1 <= bits <= {MAX_BITS}, not {head_dim}, {m}, {bits}")
        unit, name = (2, "RoPE pairs") if paired else (1, "dimensions")
        if head_dim % unit:
            raise ConfigError(f"head_dim {head_dim} is odd and has no RoPE pairs; use space='raw', pairs=False")
        units = head_dim // unit
        if units % m:
            fits = [str(i) for i in range(1, units + 1) if units % i == 0]
            raise ConfigError(f"m = {m} does not divide {units} {name}; m may be {', '.join(fits)}")
        if not paired:
            return cls(head_dim, m, bits, paired, tuple(range(head_dim)))
        first, second = pair_dims(head_dim, rope)
        order = np.concatenate([first.reshape(m, -1), second.reshape(m, -1)], 1)
        return cls(head_dim, m, bits, paired, tuple(order.ravel().tolist()))

    @property
    def sub_dim(self) -> int:
        """Dimensions a sub-space."""
        return self.head_dim // self.m

    @property
    def n_centroids(self) -> int:
        """Centroids a sub-space can have."""
        return int(2**self.bits)

    @property
    def per_word(self) -> int:
        """Codes a word."""
        if self.bits <= 4:
            return min(self.m, 8 // self.bits)
        return 2 if self.bits <= 6 and self.m > 1 else 1

    @property
    def n_words(self) -> int:
        """Words a key."""
        return -(-self.m // self.per_word)

    @property
    def word_dtype(self) -> npt.DTypeLike:
        """uint8, or uint16 where a word has more than 8 bits."""
        return np.uint16 if self.per_word * self.bits > 8 else np.uint8

    @property
    def packable(self) -> bool:
        """Whether a byte and a half holds a word and a byte does not."""
        return 8 < self.per_word * self.bits <= 12

    @property
    def order_array(self) -> npt.NDArray[np.int64]:
        """`order` as int64 [head_dim]."""
        return np.array(self.order, np.int64)


def pair_dims(head_dim: int, rope: RopeSpec | None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first and the second dimension of each pair, int64 [head_dim / 2] each.

    Dimensions behind the rotary ones, which RoPE leaves alone, are paired as halves, after the rotary pairs.
    Without a spec all dimensions are taken as rotary in the half layout.
    """
    rotary = head_dim if rope is None else rope.rotary_dim
    if rotary > head_dim or (head_dim - rotary) % 2:
        raise ConfigError(f"rotary dimension {rotary} does not fit head_dim {head_dim}")
    if rope is not None and rope.layout == "interleaved":
        first = np.arange(0, rotary, 2)
        second = first + 1
    else:
        first = np.arange(rotary // 2)
        second = first + rotary // 2
    tail = np.arange(rotary, rotary + (head_dim - rotary) // 2)
    rest = tail + (head_dim - rotary) // 2
    return np.concatenate([first, tail]).astype(np.int64), np.concatenate([second, rest]).astype(np.int64)
