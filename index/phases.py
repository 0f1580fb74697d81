"""cos and sin of RoPE angles, cheaply and the same wherever a scan begins.

A position is t = 65536 w + 256 u + v. exp(i theta t) is the product of exp(i theta 65536 w), computed once in 65536
positions, and of two small tables, exp(i theta 256 u) and exp(i theta v). Products are float64, so the angle is
as exact at a million as at one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.index.aligned import aligned
from kvstore.index.jit import STRICT, jit
from kvstore.index.rope import RopeSpec
from kvstore.index.short_codes import short_turns

BLOCK = 256
"""Positions for which a scan folds the query once: fewer and folding shows, more and their turns leave the cache."""
SUPER = BLOCK * BLOCK


@dataclass(frozen=True)
class RopeTables:
    """Tables of one RopeSpec for keys of one head_dim; read-only, shared by all indexes that need them.

    Attributes:
        angles: float64 [n_pairs], radians a position; 0 for pairs behind the rotary dimensions.
        gains: float64 [n_pairs], the attention factor, 1 for pairs behind the rotary dimensions.
        coarse: float64 [2, 256, n_pairs], cos and sin of 256 u angles.
        fine: float64 [2, 256, n_pairs], cos and sin of v angles.
        scan_coarse: float32, `coarse` for a scan: rounded once, so that its error does not grow with the position.
        scan: int16 [2, 259, n_pairs], `gains * fine` for the inner loop of a scan, which reads 4 rows at a time
            from any row on; see `short_codes`.
        gain: the largest of `gains`, which `scan` is divided by.
    """

    angles: npt.NDArray[np.float64]
    gains: npt.NDArray[np.float64]
    coarse: npt.NDArray[np.float64]
    fine: npt.NDArray[np.float64]
    scan_coarse: npt.NDArray[np.float32]
    scan: npt.NDArray[np.int16]
    gain: float


@functools.lru_cache(maxsize=64)
def rope_tables(rope: RopeSpec, head_dim: int) -> RopeTables:
    """Return the tables of a spec, n_pairs = head_dim / 2; 352 KiB at head_dim 64."""
    still = head_dim // 2 - len(rope.inv_freq)
    angles = np.array([*rope.inv_freq, *[0.0] * still], np.float64)
    gains = np.array([rope.attention_factor] * len(rope.inv_freq) + [1.0] * still, np.float64)
    steps = np.arange(BLOCK)[:, None] * angles
    fine = np.stack([np.cos(steps), np.sin(steps)])
    coarse = np.stack([np.cos(BLOCK * steps), np.sin(BLOCK * steps)])
    gain = float(gains.max())
    scan = short_turns(np.concatenate([gains * fine, np.zeros((2, 3, len(angles)))], 1), gain)
    return RopeTables(angles, gains, coarse, fine, aligned(coarse.astype(np.float32)), scan, gain)


@jit(fastmath=STRICT)
def super_phase(block: Any, angles: Any, phase: Any) -> Any:
    """Write cos and sin of the angles at the first position of the 65536 that hold block `block` of 256."""
    start = np.float64((block // BLOCK) * SUPER)
    for i in range(angles.shape[0]):
        phase[0, i] = np.cos(angles[i] * start)
        phase[1, i] = np.sin(angles[i] * start)


@jit(fastmath=STRICT)
def block_phase(block: Any, large: Any, coarse: Any, phase: Any) -> Any:
    """Write cos and sin at the first position of block `block`, given those of its 65536 in `large`."""
    u = block - (block // BLOCK) * BLOCK
    for i in range(large.shape[1]):
        c, s = coarse[0, u, i], coarse[1, u, i]
        phase[0, i] = large[0, i] * c - large[1, i] * s
        phase[1, i] = large[0, i] * s + large[1, i] * c


@jit(fastmath=STRICT)
def phases(positions: Any, angles: Any, coarse: Any, fine: Any, out: Any) -> Any:
    """Write cos and sin of each position's angles: out float32 [2, n, n_pairs] for positions int64 [n]."""
    n_pairs = angles.shape[0]
    large, small = np.empty((2, n_pairs)), np.empty((2, n_pairs))
    last = 0
    for t in range(positions.shape[0]):
        block = positions[t] // BLOCK
        if t == 0 or block != last:
            if t == 0 or block // BLOCK != last // BLOCK:
                super_phase(block, angles, large)
            block_phase(block, large, coarse, small)
            last = block
        v = positions[t] - block * BLOCK
        for i in range(n_pairs):
            c, s = fine[0, v, i], fine[1, v, i]
            out[0, t, i] = small[0, i] * c - small[1, i] * s
            out[1, t, i] = small[0, i] * s + small[1, i] * c


def position_phases(tables: RopeTables, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return cos and sin, float32 [2, n, n_pairs], of positions int64 [n]; without the attention factor."""
    out = np.empty((2, len(positions), len(tables.angles)), np.float32)
    phases(positions, tables.angles, tables.coarse, tables.fine, out)
    return out
