"""Sums a frame in which old contributions count less and less: what LFU and score-decay have in common."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from kvstore.buffer_pool.order import smallest_by
from kvstore.buffer_pool.policy import BoolArray, FloatArray, IntArray, Policy
from kvstore.errors import ConfigError

_LARGEST_UNIT = 1e100  # sums are scaled down long before float64 overflows at 1e308

DEFAULT_HALF_LIFE = 2.0


class AgedSum(Policy):
    """Evicts the frame with the smallest sum of uses, among equals the one used longest ago.

    Old uses do not shrink; new ones grow instead, by a constant factor a use, so that ageing costs nothing a frame.
    half_life: after `half_life * n_frames` uses of any frames a use counts half; infinity for no ageing.

    Insert, touch, remove: O(n) of the batch. Victims: O(n_frames).
    """

    def __init__(self, n_frames: int, half_life: float = DEFAULT_HALF_LIFE) -> None:
        super().__init__(n_frames)
        if not half_life > 0:
            raise ConfigError(f"half_life must be above 0 (uses a frame, infinity for no ageing), not {half_life}")
        self._growth = 1 / (half_life * max(1, n_frames))  # log2 of the factor
        self._unit = 1.0  # what a use of weight 1 adds now
        self._sums = np.zeros(n_frames)
        self._stamps = np.zeros(n_frames, np.int64)  # of the last use; 0: not followed
        self._now = 1

    @abstractmethod
    def _amounts(self, weights: FloatArray) -> FloatArray:
        """What uses of these weights add, in units."""

    def insert(self, frames: IntArray, ids: IntArray, weights: FloatArray) -> None:
        """Begin a sum with the first use."""
        self._sums[frames] = 0
        self.touch(frames, weights)

    def touch(self, frames: IntArray, weights: FloatArray) -> None:
        """Add the uses of a batch; all of them count alike."""
        n = len(frames)
        np.add.at(self._sums, frames, self._unit * self._amounts(weights))
        self._stamps[frames] = np.arange(self._now, self._now + n)
        self._now += n
        self._unit *= 2.0 ** (n * self._growth)
        if self._unit > _LARGEST_UNIT:
            self._sums /= self._unit
            self._unit = 1.0

    def remove(self, frames: IntArray) -> None:
        """Forget."""
        self._stamps[frames] = 0

    def victims(self, n: int, evictable: BoolArray) -> IntArray:
        """Choose the n smallest sums."""
        candidates = np.flatnonzero(evictable)
        frames = candidates[smallest_by(self._sums[candidates], self._stamps[candidates], n)]
        self._stamps[frames] = 0
        return frames

    def _check(self, resident: BoolArray) -> None:
        assert np.array_equal(self._stamps > 0, resident), "stamped frames are not the resident ones"
        assert np.isfinite(self._sums).all()
        assert (self._sums >= 0).all()
        assert 1 <= self._unit <= _LARGEST_UNIT
