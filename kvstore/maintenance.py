"""Background work of a store: threads that start when there is something to do, joined when the store closes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kvstore.errors import MaintenanceError

T = TypeVar("T")


class CancelledWork(Exception):  # noqa: N818 - not an error: nobody wants the result any more
    """Ends a job early from inside."""


class Job(Generic[T]):
    """One piece of work. It computes; only the caller's own thread changes the store, when it takes the result."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._future: Future[T] | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result or a failure to take."""
        return self._future is not None and self._future.done()

    @property
    def failed(self) -> bool:
        """Whether it ended with a failure."""
        return self.done and (self._future.cancelled() or self._future.exception() is not None)  # type: ignore[union-attr]

    def cancel(self) -> None:
        """Say that the result is not wanted; what runs stops at its next check point."""
        self._cancelled.set()
        if self._future is not None:
            self._future.cancel()

    def check_point(self) -> None:
        """Raise `CancelledWork` when the result is not wanted; called by the work itself."""
        if self._cancelled.is_set():
            raise CancelledWork

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is done, however it ends; raises `TimeoutError`."""
        with suppress(MaintenanceError):
            self.result(timeout_s)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait and return the result; raises `MaintenanceError` from what the work raised, `TimeoutError` if late."""
        assert self._future is not None, "the job was not submitted"
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if not self._future.done():
                raise
            failure: BaseException | None = self._future.exception()
        except BaseException as error:
            if not self._future.done():  # an interrupt of the waiting thread
                raise
            failure = error
        raise MaintenanceError(
            f"work in the background failed, the index is as it was, or none; reindex() tries again: {failure!r}"
        ) from failure


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function that says how many of these seconds are left; None stays None."""
    if timeout_s is None:
        return lambda: None
    end_s = time.monotonic() + timeout_s
    return lambda: max(0.0, end_s - time.monotonic())


class Maintenance:
    """Runs jobs in the order they come. `executor` may be set, before the first job, to one that a test steps."""

    def __init__(self, threads: int = 1) -> None:
        self.executor: Executor | None = None
        self._threads = threads

    def submit(self, work: Callable[[Job[T]], T]) -> Job[T]:
        """Queue work, which gets its job to ask whether it is wanted. Where no thread can be had the job has failed."""
        if self.executor is None:
            self.executor = ThreadPoolExecutor(self._threads, "kvstore-maintenance")
        job: Job[T] = Job()
        try:
            job._future = self.executor.submit(work, job)
        except Exception as error:  # to be heard where work that fails is heard, and not in the middle of a step
            job.cancel()  # the queue has taken it all the same, for a thread that comes later
            job = Job()
            job._future = Future()
            job._future.set_exception(error)
        return job

    def close(self) -> None:
        """Drop what waits, wait for what runs, join the threads."""
        executor: Any = self.executor
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        self.executor = None
