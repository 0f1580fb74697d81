"""What each frame is: free, reserved, or the home of a block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

FREE, RESERVED, RESIDENT = 0, 1, 2
NO_BLOCK = -1  # owner of a frame that is not resident; as a block id it means nothing special


class FrameStates:
    """State and owner of each frame; callers check that frames are in the state which a change begins with.

    Attributes:
        states: int8 [n_frames]. owners: int64 [n_frames], block ids where resident.
    """

    def __init__(self, n_frames: int) -> None:
        self.states = np.full(n_frames, FREE, np.int8)
        self.owners: IntArray = np.full(n_frames, NO_BLOCK, np.int64)
        self._free = np.arange(n_frames)[::-1].copy()  # a stack in [:n_free]; the top is its last
        self.n_free = n_frames
        self.n_reserved = 0

    @property
    def n_resident(self) -> int:
        """Frames that hold a block."""
        return len(self.states) - self.n_free - self.n_reserved

    @property
    def resident(self) -> npt.NDArray[np.bool_]:
        """Which frames hold a block, bool [n_frames]. O(n_frames)."""
        resident: npt.NDArray[np.bool_] = self.states == RESIDENT
        return resident

    def all_are(self, state: int, frames: IntArray) -> bool:
        """Whether all these frames are in the state."""
        return bool((self.states[frames] == state).all())

    def take_free(self, n: int) -> IntArray:
        """Reserve n <= n_free free frames, int64 [n]."""
        self.n_free -= n
        frames = self._free[self.n_free : self.n_free + n][::-1].copy()
        self.states[frames] = RESERVED
        self.n_reserved += n
        return frames

    def take_over(self, frames: IntArray) -> None:
        """Reserve resident frames, whose blocks are gone."""
        self.owners[frames] = NO_BLOCK
        self.states[frames] = RESERVED
        self.n_reserved += len(frames)

    def occupy(self, frames: IntArray, ids: IntArray) -> None:
        """Let reserved frames be the homes of blocks."""
        self.owners[frames] = ids
        self.states[frames] = RESIDENT
        self.n_reserved -= len(frames)

    def give_back(self, frames: IntArray) -> None:
        """Free reserved frames."""
        self.states[frames] = FREE
        self._free[self.n_free : self.n_free + len(frames)] = frames[::-1]
        self.n_free += len(frames)
        self.n_reserved -= len(frames)

    def free_frames(self) -> IntArray:
        """Return the free frames, int64 [n_free]; a copy."""
        return self._free[: self.n_free].copy()

    def _check(self) -> None:
        """Assert that the free frames are those on the stack, that counts equal a recount, and who has no owner."""
        assert np.array_equal(np.sort(self.free_frames()), np.flatnonzero(self.states == FREE)), "free frames differ"
        assert self.n_reserved == np.count_nonzero(self.states == RESERVED), "reserved frames differ from a recount"
        assert self.n_resident == np.count_nonzero(self.resident), "resident frames differ from a recount"
        assert (self.owners[~self.resident] == NO_BLOCK).all(), "a frame that is not resident has an owner"
