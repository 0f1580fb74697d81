"""CLOCK: a hand goes round the frames and evicts what was not used since it last came by."""

from __future__ import annotations

import numpy as np

from kvstore.buffer_pool.policy import BoolArray, FloatArray, IntArray, Policy


class Clock(Policy):
    """Second chance: one bit a frame, nothing to order; weights count for nothing.

    Insert, touch, remove: O(n) of the batch. Victims: O(n_frames), never more than two rounds of the hand.
    """

    def __init__(self, n_frames: int) -> None:
        super().__init__(n_frames)
        self._used = np.zeros(n_frames, np.bool_)
        self._followed = np.zeros(n_frames, np.bool_)
        self._hand = 0

    def insert(self, frames: IntArray, ids: IntArray, weights: FloatArray) -> None:
        """Set the bit: what is new gets one chance."""
        self._followed[frames] = True
        self._used[frames] = True

    def touch(self, frames: IntArray, weights: FloatArray) -> None:
        """Set the bit."""
        self._used[frames] = True

    def remove(self, frames: IntArray) -> None:
        """Forget."""
        self._followed[frames] = False
        self._used[frames] = False

    def victims(self, n: int, evictable: BoolArray) -> IntArray:
        """Let the hand clear bits until it has met n frames without one."""
        order = np.flatnonzero(evictable)
        split = order.searchsorted(self._hand)
        order = np.concatenate([order[split:], order[:split]])  # as the hand meets them
        used = self._used[order]
        frames = order[~used][:n]
        if len(frames) == n:  # within the first round
            passed = order[: np.flatnonzero(~used)[n - 1] + 1] if n else order[:0]
        else:
            frames, passed = np.concatenate([frames, order[used][: n - len(frames)]]), order
        self._used[passed] = False
        if n:
            self._hand = (int(frames[-1]) + 1) % self.n_frames
        self.remove(frames)
        return frames

    def _check(self, resident: BoolArray) -> None:
        assert np.array_equal(self._followed, resident), "followed frames are not the resident ones"
        assert not (self._used & ~resident).any(), "a frame without a block has its bit set"
        assert 0 <= self._hand < max(1, self.n_frames)
