"""LRU: evict what was used longest ago."""

from __future__ import annotations

import numpy as np

from kvstore.buffer_pool.order import smallest
from kvstore.buffer_pool.policy import BoolArray, FloatArray, IntArray, Policy


class LRU(Policy):
    """Exact least recently used, by a stamp a frame; weights count for nothing.

    Insert, touch, remove: O(n) of the batch. Victims: O(n_frames), two passes over arrays.
    """

    def __init__(self, n_frames: int) -> None:
        super().__init__(n_frames)
        self._stamps = np.zeros(n_frames, np.int64)  # of the last use; 0: not followed
        self._now = 1

    def insert(self, frames: IntArray, ids: IntArray, weights: FloatArray) -> None:
        """Stamp."""
        self.touch(frames, weights)

    def touch(self, frames: IntArray, weights: FloatArray) -> None:
        """Stamp: later ones of a batch are more recent, the last one counts where a frame repeats."""
        self._stamps[frames] = np.arange(self._now, self._now + len(frames))
        self._now += len(frames)

    def remove(self, frames: IntArray) -> None:
        """Forget."""
        self._stamps[frames] = 0

    def victims(self, n: int, evictable: BoolArray) -> IntArray:
        """Choose the n oldest."""
        candidates = np.flatnonzero(evictable)
        frames = candidates[smallest(self._stamps[candidates], n)]
        self._stamps[frames] = 0
        return frames

    def _check(self, resident: BoolArray) -> None:
        assert np.array_equal(self._stamps > 0, resident), "stamped frames are not the resident ones"
        stamps = self._stamps[resident]
        assert len(np.unique(stamps)) == len(stamps), "two frames have one stamp"
        assert (stamps < self._now).all()
