"""The contract of replacement policies."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Policy(ABC):
    """Decides which resident frames lose their blocks. It knows frames, not data, pins or tiers.

    A pool calls it with batches, in the order in which things happen, and checks their contents first. Within a batch,
    what comes later counts as more recent. Frames are int64 [n], in [0, n_frames); those of a batch to `insert` or
    `remove` differ from each other, those of a batch to `touch` may repeat.
    """

    def __init__(self, n_frames: int) -> None:
        self.n_frames = n_frames

    @abstractmethod
    def insert(self, frames: IntArray, ids: IntArray, weights: FloatArray) -> None:
        """Begin to follow frames that have become resident, with the blocks ids, int64 [n]: their first use.

        weights: float64 [n], how much that use counts, >= 0.
        """

    @abstractmethod
    def touch(self, frames: IntArray, weights: FloatArray) -> None:
        """Note that the blocks in frames were used; weights as in `insert`."""

    @abstractmethod
    def remove(self, frames: IntArray) -> None:
        """Stop following frames whose blocks are gone for good."""

    @abstractmethod
    def victims(self, n: int, evictable: BoolArray) -> IntArray:
        """Choose n frames to evict, the first to go first, and stop following them.

        evictable: bool [n_frames], true for at least n frames, all of them followed; no others are chosen.
        """

    @abstractmethod
    def _check(self, resident: BoolArray) -> None:
        """Assert that exactly the frames of resident, bool [n_frames], are followed, and the own invariants."""
