"""Pin counts, and pins that wait for the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.buffer_pool.events import Event, Recorder
from kvstore.buffer_pool.guard import PinGuard

IntArray = npt.NDArray[np.int64]


class Pins:
    """How many guards pin each frame.

    A kernel may still read a frame when the Python code that launched it has left its guard. So a release records an
    event, and the pin counts until the event has happened.

    Attributes:
        counts: int64 [n_frames], pins of living guards and of released ones whose event has not happened.
    """

    def __init__(self, n_frames: int, record_event: Recorder) -> None:
        self.counts: IntArray = np.zeros(n_frames, np.int64)
        self._record_event = record_event
        self._living: set[PinGuard] = set()
        self._leaving: list[tuple[Event, IntArray]] = []

    @property
    def n_guards(self) -> int:
        """Guards that live."""
        return len(self._living)

    def add(self, frames: IntArray) -> PinGuard:
        """Pin frames, int64 [n], once for each time they occur."""
        guard = PinGuard(frames, self._release)
        np.add.at(self.counts, frames, 1)
        self._living.add(guard)
        return guard

    def settle(self, *, wait: bool = False) -> None:
        """Take off the pins whose event has happened; with `wait`, of all guards that were released."""
        leaving = self._leaving
        if wait:
            for event, _ in leaving:
                event.synchronize()
        done = [wait or event.query() for event, _ in leaving]  # a device that fails does so before anything is changed
        for (_, frames), is_done in zip(leaving, done, strict=True):
            if is_done:
                np.subtract.at(self.counts, frames, 1)
        self._leaving = [each for each, is_done in zip(leaving, done, strict=True) if not is_done]

    def _release(self, guard: PinGuard) -> None:
        self._leaving.append((self._record_event(), guard.frames))
        self._living.discard(guard)
        self.settle()

    def _check(self) -> None:
        """Assert that the counts are those of a recount, so none is negative, and that a released guard is gone."""
        assert not any(guard.released for guard in self._living), "a released guard still pins"
        pinned = [guard.frames for guard in self._living] + [frames for _, frames in self._leaving]
        recount = np.bincount(np.concatenate([np.zeros(0, np.int64), *pinned]), minlength=len(self.counts))
        assert np.array_equal(recount, self.counts), "pin counts differ from a recount"
