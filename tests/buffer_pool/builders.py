"""Pools with something in them, and what a pool holds as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kvstore.buffer_pool import BufferPool

FRAME_BYTES = 72  # no multiple of the alignment


def content(block: int) -> torch.Tensor:
    """The bytes of a block, uint8 [FRAME_BYTES], none of them 0xFF."""
    return torch.from_numpy(((block % 251 + 7 * np.arange(FRAME_BYTES)) % 251).astype(np.uint8))


def load(block: int, frame: torch.Tensor) -> None:
    frame.copy_(content(block))


def make_pool(n_frames: int = 4, **settings: Any) -> BufferPool:
    return BufferPool(n_frames, FRAME_BYTES, **{"debug": True, **settings})


def put(pool: BufferPool, *ids: int) -> None:
    """Reserve, copy, commit; there must be room."""
    frames = pool.reserve(len(ids))
    assert frames is not None
    for frame, block in zip(frames.tolist(), ids, strict=True):
        load(block, pool.frames[frame])
    pool.commit(ids, frames)
    pool._check()


def full_pool(n_frames: int = 4, **settings: Any) -> BufferPool:
    """A pool of the blocks 10, 11, ..., the first being the oldest."""
    pool = make_pool(n_frames, **settings)
    put(pool, *range(10, 10 + n_frames))
    return pool


def held(pool: BufferPool) -> list[int]:
    """Ids of the blocks in the pool, after a look at their bytes."""
    ids = pool.resident()
    for block, frame in zip(ids.tolist(), pool._residency.table.find(ids).tolist(), strict=True):
        assert torch.equal(pool.frames[frame], content(block)), f"frame {frame} does not hold block {block}"
    return ids.tolist()


def everything(pool: BufferPool) -> Any:
    """All that a pool is, as plain values that can be compared."""
    states, table = pool._residency.states, pool._residency.table
    return {
        "blocks": held(pool),
        "frames": table.find(pool.resident()).tolist(),
        "states": states.states.tolist(),
        "free": states.free_frames().tolist(),
        "pins": pool._pins.counts.tolist(),
        "counters": asdict(pool.counters),
        "policy": {name: plain(value) for name, value in vars(pool.policy).items()},
    }


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, dict) else value


class Device:
    """Stands for a device that works behind Python's back: an event happens when the test says so."""

    def __init__(self) -> None:
        self.pending: list[Work] = []

    def record(self) -> Work:
        self.pending.append(Work())
        return self.pending[-1]

    def finish(self, n: int | None = None) -> None:
        """Let the n oldest events happen, or all."""
        for event in self.pending[:n]:
            event.done = True
        del self.pending[:n]


class Work:
    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True
