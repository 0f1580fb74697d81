"""ARC: recency and frequency share the frames, and what comes back after its eviction says who should have had more."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvstore.buffer_pool.order import smallest
from kvstore.buffer_pool.policy import BoolArray, FloatArray, IntArray, Policy

Ghosts = OrderedDict[int, None]


class ARC(Policy):
    """Adaptive replacement (Megiddo and Modha, FAST 2003), in batches; weights count for nothing.

    Frames used once are *recent*, those used again *frequent*; each kind is evicted in order of use. The ids of evicted
    blocks are kept as ghosts, by block id, since their frames hold others by then. A block that returns while it is a
    ghost moves the target for the number of recent frames, which batches feel one late: victims are chosen before it is
    known what comes in.

    Insert: O(n) with a step in Python a block. Touch, remove: O(n). Victims: O(n_frames) and a step a victim.
    """

    def __init__(self, n_frames: int) -> None:
        super().__init__(n_frames)
        self._stamps = np.zeros(n_frames, np.int64)  # of the last use; 0: not followed
        self._frequent = np.zeros(n_frames, np.bool_)
        self._ids = np.zeros(n_frames, np.int64)
        self._now = 1
        self._target = 0.0  # frames that recent blocks should have
        self._recent_ghosts: Ghosts = OrderedDict()  # the oldest first
        self._frequent_ghosts: Ghosts = OrderedDict()

    def insert(self, frames: IntArray, ids: IntArray, weights: FloatArray) -> None:
        """Follow blocks as recent, or as frequent where they were seen not long ago."""
        self._stamp(frames)
        self._ids[frames] = ids
        self._frequent[frames] = [self._returns(block) for block in ids.tolist()]
        self._trim()

    def touch(self, frames: IntArray, weights: FloatArray) -> None:
        """A second use makes a block frequent."""
        self._stamp(frames)
        self._frequent[frames] = True

    def remove(self, frames: IntArray) -> None:
        """Forget, without a ghost."""
        self._stamps[frames] = 0
        self._frequent[frames] = False

    def victims(self, n: int, evictable: BoolArray) -> IntArray:
        """Take recent frames while there are more than the target, and frequent ones otherwise, the oldest first.

        The n blocks that will come are counted as recent: one by one, each would be there when the next one is let in.
        """
        recent = np.flatnonzero(evictable & ~self._frequent)
        frequent = np.flatnonzero(evictable & self._frequent)
        lacking = max(0, int(self._target) + 1 - self._n_recent())
        n_frequent = min(lacking, n, len(frequent))
        n_frequent = max(n_frequent, n - len(recent))
        frames = np.concatenate([self._oldest(recent, n - n_frequent), self._oldest(frequent, n_frequent)])
        for block, was_frequent in zip(self._ids[frames].tolist(), self._frequent[frames].tolist(), strict=True):
            (self._frequent_ghosts if was_frequent else self._recent_ghosts)[block] = None
        self.remove(frames)
        self._trim()
        return frames

    def _stamp(self, frames: IntArray) -> None:
        self._stamps[frames] = np.arange(self._now, self._now + len(frames))
        self._now += len(frames)

    def _oldest(self, frames: IntArray, n: int) -> IntArray:
        return frames[smallest(self._stamps[frames], n)]

    def _returns(self, block: int) -> bool:
        """Whether the block was a ghost; moves the target if so."""
        n_recent, n_frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if block in self._recent_ghosts:
            self._target = min(float(self.n_frames), self._target + max(1.0, n_frequent / n_recent))
            del self._recent_ghosts[block]
        elif block in self._frequent_ghosts:
            self._target = max(0.0, self._target - max(1.0, n_recent / n_frequent))
            del self._frequent_ghosts[block]
        else:
            return False
        return True

    def _trim(self) -> None:
        """Forget the oldest ghosts: recent frames and ghosts are n_frames at most, everything twice as many."""
        n_recent, n_followed = self._n_recent(), int(np.count_nonzero(self._stamps))
        while self._recent_ghosts and n_recent + len(self._recent_ghosts) > self.n_frames:
            self._recent_ghosts.popitem(last=False)
        room = 2 * self.n_frames - n_followed - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > room:
            self._frequent_ghosts.popitem(last=False)

    def _n_recent(self) -> int:
        return int(np.count_nonzero(self._stamps) - np.count_nonzero(self._frequent))

    def _check(self, resident: BoolArray) -> None:
        assert np.array_equal(self._stamps > 0, resident), "stamped frames are not the resident ones"
        assert not (self._frequent & ~resident).any(), "a frame without a block is frequent"
        assert 0 <= self._target <= self.n_frames
        ghosts = [*self._recent_ghosts, *self._frequent_ghosts]
        assert len(set(ghosts)) == len(ghosts), "a block is a ghost twice"
        assert not set(ghosts) & set(self._ids[resident].tolist()), "a resident block is a ghost"
        assert self._n_recent() + len(self._recent_ghosts) <= self.n_frames
        assert np.count_nonzero(resident) + len(ghosts) <= 2 * self.n_frames
