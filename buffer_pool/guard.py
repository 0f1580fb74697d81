"""A guard: while it lives, its frames keep their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.buffer_pool.errors import GuardReleasedError

IntArray = npt.NDArray[np.int64]


class PinGuard:
    """A pin on frames, as a context manager; made by `BufferPool.pin`.

    After `release` (or the end of the `with` block) the frames may be evicted as soon as the device has finished what
    was given to its stream until then. A guard that is forgotten pins its frames for good.
    """

    __slots__ = ("_frames", "_unpin")

    def __init__(self, frames: IntArray, unpin: Callable[[PinGuard], None]) -> None:
        self._frames: IntArray | None = frames
        self._unpin = unpin

    @property
    def frames(self) -> IntArray:
        """The frames pinned, int64 [n], a copy; raises `GuardReleasedError` once they are not."""
        if self._frames is None:
            raise GuardReleasedError("this guard was released: its frames may hold other blocks; pin again")
        return self._frames.copy()

    @property
    def released(self) -> bool:
        """Whether the pins are gone."""
        return self._frames is None

    def release(self) -> None:
        """Unpin; raises `GuardReleasedError` the second time."""
        _ = self.frames
        self._unpin(self)
        self._frames = None

    def __enter__(self) -> Self:
        _ = self.frames
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.released:  # the body may have done it
            self.release()
