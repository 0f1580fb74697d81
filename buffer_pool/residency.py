"""Which blocks are in which frames, and which of them may go."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.buffer_pool.errors import FramePinnedError, FrameStateError, InvalidBatchError
from kvstore.buffer_pool.page_table import PageTable
from kvstore.buffer_pool.pins import Pins
from kvstore.buffer_pool.policy import BoolArray, FloatArray, IntArray, Policy
from kvstore.buffer_pool.states import RESERVED, RESIDENT, FrameStates
from kvstore.buffer_pool.validate import has_repeats


class Residency:
    """Page table, frame states, pins and policy, which change together.

    Checks what depends on its own state, and nothing else; what raises has changed nothing.
    """

    def __init__(self, policy: Policy, pins: Pins) -> None:
        self.policy = policy
        self.pins = pins
        self.states = FrameStates(policy.n_frames)
        self.table = PageTable()

    def evictable(self, protected: IntArray) -> BoolArray:
        """Return which frames may lose their block now, bool [n_frames]: resident, not pinned, not protected."""
        self.pins.settle()
        evictable: npt.NDArray[np.bool_] = self.states.resident & (self.pins.counts == 0)
        evictable[protected] = False
        return evictable

    def reserve(self, n: int, evictable: BoolArray) -> tuple[IntArray, IntArray] | None:
        """Reserve n frames, free ones first; return them and the evicted among them, or None when there are too few."""
        n_free = min(n, self.states.n_free)
        if n - n_free > np.count_nonzero(evictable):
            return None
        victims = np.zeros(0, np.int64)
        if n > n_free:
            victims = self.policy.victims(n - n_free, evictable)
            self.table.remove(self.states.owners[victims])
            self.states.take_over(victims)
        return np.concatenate([self.states.take_free(n_free), victims]), victims

    def commit(self, ids: IntArray, frames: IntArray, weights: FloatArray) -> None:
        """Let blocks that differ be visible in reserved frames; raises `InvalidBatchError` and `FrameStateError`."""
        if len(ids) != len(frames):
            raise InvalidBatchError(f"{len(ids)} blocks cannot be committed to {len(frames)} frames")
        self._check_reserved(frames)
        if (known := self.table.find(ids) >= 0).any():
            raise InvalidBatchError(f"block {ids[known][0]} is resident already; drop it first")
        self.table.add(ids, frames)
        self.states.occupy(frames, ids)
        self.policy.insert(frames, ids, weights)

    def abort(self, frames: IntArray) -> None:
        """Free reserved frames; raises `FrameStateError` for others."""
        self._check_reserved(frames)
        self.states.give_back(frames)

    def drop(self, ids: IntArray) -> IntArray:
        """Free the frames of blocks that differ, and return those there were; raises `FramePinnedError`."""
        frames = self.table.find(ids)
        ids, frames = ids[frames >= 0], frames[frames >= 0]
        if self.pins.counts[frames].any():
            self.pins.settle(wait=True)
        if pinned := int(np.count_nonzero(self.pins.counts[frames])):
            raise FramePinnedError(f"{pinned} of {len(frames)} blocks are pinned; release their guards before the drop")
        self.policy.remove(frames)
        self.table.remove(ids)
        self.states.take_over(frames)
        self.states.give_back(frames)
        return frames

    def check_resident(self, frames: IntArray, verb: str) -> None:
        """Raise `FrameStateError` for frames that hold no block."""
        if not self.states.all_are(RESIDENT, frames):
            empty = frames[self.states.states[frames] != RESIDENT]
            raise FrameStateError(f"frame {empty[0]} holds no block and cannot be {verb}; look the block up again")

    def _check_reserved(self, frames: IntArray) -> None:
        if has_repeats(frames):
            raise FrameStateError(f"frames must differ from each other: {len(frames)}, {len(np.unique(frames))} differ")
        if not self.states.all_are(RESERVED, frames):
            other = frames[self.states.states[frames] != RESERVED]
            raise FrameStateError(
                f"frame {other[0]} is not reserved; only what reserve() returned can be filled or freed"
            )

    def _check(self) -> None:
        """Assert that all four agree on which frames are resident, and that only those are pinned."""
        resident = self.states.resident
        self.states._check()
        self.table._check(self.states.owners, resident)
        self.pins._check()
        self.policy._check(resident)
        assert not self.pins.counts[~resident].any(), "a frame without a block is pinned"
