"""Executors whose steps a test decides, so that no test of background work needs to sleep."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from typing import Any


class ByHand(Executor):
    """Runs what was submitted when the test says so, on the test's own thread."""

    def __init__(self) -> None:
        self.queue: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, work, /, *arguments):
        future: Future[Any] = Future()
        self.queue.append((future, work, arguments))
        return future

    def run(self) -> None:
        queue, self.queue = self.queue, []
        for future, work, arguments in queue:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments))
                except BaseException as error:
                    future.set_exception(error)

    def shutdown(self, wait=True, *, cancel_futures=False):
        for future, _, _ in self.queue:
            future.cancel()


class Stepping(Executor):
    """Runs each piece of work on a thread of its own, from one check point to the next as the test says.

    Whoever waits for a result without a limit has the work run to its end: nobody else would.
    """

    def __init__(self) -> None:
        self.works: list[SteppedWork] = []

    def submit(self, work, /, *arguments):
        stepped = SteppedWork(work, *arguments)
        self.works.append(stepped)
        return stepped.future

    @property
    def open(self) -> list[SteppedWork]:
        """Work that has not ended."""
        return [work for work in self.works if not work.future.done()]

    def advance(self, which: int, n_steps: int) -> None:
        """Let some work, if there is any, go on by so many check points."""
        if self.open:
            work = self.open[which % len(self.open)]
            for _ in range(n_steps):
                work.step()

    def finish(self) -> None:
        """Run all work to its end."""
        for work in self.open:
            work.finish()

    def shutdown(self, wait=True, *, cancel_futures=False):
        for work in self.open:
            if cancel_futures:
                work.future.cancel()
            work.finish()


class SteppedFuture(Future):
    work: SteppedWork

    def result(self, timeout=None):
        if timeout is None and not self.done():
            self.work.finish()
        return super().result(60 if timeout is None else timeout)


class SteppedWork:
    """Work that stands at a check point, or has not begun, or has ended."""

    def __init__(self, work, job) -> None:
        self.future = SteppedFuture()
        self.future.work = self
        self.layer = getattr(work, "layer", None)
        self._work, self._job = work, job
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """Go on to the next check point, or to the end."""
        if self.future.done():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stepped", daemon=True)
            self._thread.start()
        self._go.release()
        assert self._stands.acquire(timeout=60), "the work neither ended nor came to a check point"

    def fail(self, error: BaseException) -> None:
        """End with this error where it stands now."""
        self._fault = error
        self.finish()

    def finish(self) -> None:
        """Run to the end."""
        while not self.future.done():
            self.step()
        if self._thread is not None:
            self._thread.join(60)

    def _run(self) -> None:
        self._go.acquire()
        check = self._job.check_point
        self._job.check_point = lambda: (check(), self._pause(), check())
        if self.future.set_running_or_notify_cancel():
            try:
                self._raise_fault()
                result = self._work(self._job)
            except BaseException as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        self._stands.release()

    def _pause(self) -> None:
        self._stands.release()
        self._go.acquire()
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault
