"""Executors whose steps a test decides, so that no test of background work needs to sleep."""

from __future__ import annotations

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
