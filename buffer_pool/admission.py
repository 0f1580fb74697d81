"""Which blocks are let into a pool: those that hold most of what was selected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvstore.buffer_pool.frames import Frames

IntArray = npt.NDArray[np.int64]

Load = Callable[[int, torch.Tensor], object]
"""Is given a block id and uint8 [frame_bytes] on the pool's device; fills the whole of it, or raises."""


ADMIT_SHARE = 0.75


def admission_limit(n_frames: int, batches_per_step: int) -> int:
    """Return how many blocks each batch may let in, where a decode step makes that many batches: layers x sequences.

    A block comes back a step later. If a step puts more blocks at the top of the order than there are frames, LRU has
    evicted each of them by then and finds nothing at all; with three quarters of the frames it also loads the least.
    A pool with fewer frames than batches gets 1, which is too much for LRU; score-decay bears it.

    >>> admission_limit(384, 30)
    9
    """
    return max(1, int(ADMIT_SHARE * n_frames / batches_per_step)) if n_frames else 0


def best_first(counts: npt.NDArray[np.float64], limit: int) -> IntArray:
    """Return where the `limit` largest counts above 0 are, the largest first; among equals the earlier. O(n log n).

    >>> best_first(np.array([1.0, 0.0, 4.0, 1.0]), 2).tolist()
    [2, 0]
    """
    order = (-counts).argsort(kind="stable")[:limit]
    return order[counts[order] > 0]


class Staging:
    """Room where the blocks of one admission arrive, so that one which fails has changed no frame.

    Allocated when it is first needed: pools that are filled by reserve and commit have none.
    """

    def __init__(self, n_frames: int, frame_bytes: int, device: torch.device, *, debug: bool) -> None:
        self._size = n_frames, frame_bytes
        self._device = device
        self._debug = debug
        self._frames: Frames | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._frames.nbytes if self._frames is not None else 0

    def fill(self, ids: IntArray, load: Load) -> torch.Tensor:
        """Load blocks, int64 [n]; return them, uint8 [n, frame_bytes], until the next call. Raises what load raises."""
        if self._frames is None:
            self._frames = Frames(*self._size, self._device, poisoned=self._debug)
        elif self._debug:
            self._frames.poison(np.arange(self._size[0]))
        rows = self._frames.data[: len(ids)]
        for block, row in zip(ids.tolist(), rows, strict=True):
            load(block, row)
        return rows
