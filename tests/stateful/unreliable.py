"""Workers that come late, fail, or cannot be had; what they were made to do is written down."""

from __future__ import annotations

import random
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from tests.executors import SteppedWork, Stepping

DELAYS_S = (0.0, 0.0, 0.0005, 0.002)


class LostError(Exception):
    """What is made to go wrong in the background; each is raised once."""


class Late(Stepping):
    """Work goes on when the schedule says so, or when somebody waits for it.

    Attributes:
        faults: (job, error) of work that was made to fail.
        refusals: calls of `submit` that are going to fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[tuple[Any, LostError]] = []
        self.refusals = 0

    def submit(self, work, /, *arguments):
        """Take work, or say that there is no thread for it."""
        if self.refusals:
            self.refusals -= 1
            error = LostError("no thread can be had")
            self.faults.append((arguments[0], error))
            raise error
        return super().submit(work, *arguments)

    def fail(self, work: SteppedWork) -> None:
        """End work with an error where it stands."""
        error = LostError("made to fail")
        self.faults.append((work._job, error))
        work.fail(error)


class Unsteady(Executor):
    """Real threads that are late, and fail now and then, as a seed says; it has the attributes of `Late`."""

    def __init__(self, threads: int, seed: int) -> None:
        self.faults: list[tuple[Any, LostError]] = []
        self.refusals = 0
        self.works: list[SteppedWork] = []
        self.open: list[SteppedWork] = []
        self._chance = random.Random(seed)
        self._threads = ThreadPoolExecutor(threads, "unsteady")

    def submit(self, work, /, *arguments):
        """Hand work to a thread, with a delay before each of its check points, and perhaps an error at one."""
        [job] = arguments
        chance = random.Random(self._chance.random())
        error, at = (LostError("made to fail"), chance.randrange(3)) if chance.random() < 0.2 else (None, -1)
        if error is not None:
            self.faults.append((job, error))
        check, places = job.check_point, iter(range(99))

        def check_point():
            """Be late, then fail or go on."""
            time.sleep(chance.choice(DELAYS_S))
            check()
            if error is not None and next(places) >= at:
                raise error

        def run():
            """Do the work; one that has passed too few check points fails at its end."""
            job.check_point = check_point
            result = work(job)
            if error is not None:
                raise error
            return result

        return self._threads.submit(run)

    def advance(self, which: int, n_steps: int) -> None:
        """Do nothing: threads go on by themselves."""

    def finish(self) -> None:
        """Do nothing: threads end by themselves."""

    def shutdown(self, wait=True, *, cancel_futures=False):
        """End the threads."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
