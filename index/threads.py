"""Running parallel kernels beside torch and beside other Python threads."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba

from kvstore.errors import ForkedStoreError

_WAKE_NS = 40_000.0
"""Work worth dividing: waking a sleeping thread takes 10 to 100 microseconds."""


def run_parallel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel that was compiled with `parallel=True`; safe from several Python threads at once."""
    lock = _launch(os.getpid())
    if lock is None:
        return kernel(*arguments)
    with lock:
        return kernel(*arguments)


def begin_work(work_ns: float) -> int:
    """Keep the kernels that follow on the calling thread if their work is too little to wake others for it.

    Returns what `end_work` needs; a pair of plain calls, because a search is short.
    """
    _launch(os.getpid())
    if work_ns >= _WAKE_NS:
        return 0
    before: int = numba.get_num_threads()
    if before == 1:
        return 0
    numba.set_num_threads(1)
    return before


def end_work(before: int) -> None:
    """Undo `begin_work`."""
    if before:
        numba.set_num_threads(before)


def run_sized(work_ns: float, kernel: Callable[..., Any], *arguments: Any) -> Any:
    """`run_parallel` between `begin_work` and `end_work`."""
    before = begin_work(work_ns)
    try:
        return run_parallel(kernel, *arguments)
    finally:
        end_work(before)


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """Let the parallel kernels that this Python thread calls use `count` threads, at most those Numba has."""
    _launch(os.getpid())
    before = numba.get_num_threads()
    with _torch_threads_kept():
        numba.set_num_threads(max(1, min(count, numba.config.NUMBA_NUM_THREADS)))
    try:
        yield
    finally:
        with _torch_threads_kept():
            numba.set_num_threads(before)


@functools.cache
def _launch(pid: int) -> threading.Lock | None:
    """Start Numba's threads once a process; return the lock that calls must hold, if its threading layer needs one.

    Raises `ForkedStoreError` in the forked child of a process that has started them: GNU's OpenMP does not survive a
    fork, and Numba would end the child by a signal.

    The layer `workqueue` (the fallback where neither OpenMP nor TBB is found) aborts the process when two
    Python threads enter it at once.
    """
    is_forked = _launch.cache_info().currsize > 0
    if is_forked and numba.threading_layer() == "omp" and sys.platform == "linux":
        raise ForkedStoreError(
            f"process {pid} was forked from one whose kernels run on OpenMP, which does not survive it; start workers "
            f"with spawn, or set NUMBA_THREADING_LAYER=workqueue"
        )
    with _torch_threads_kept():
        numba.get_num_threads()  # launches
    return threading.Lock() if numba.threading_layer() == "workqueue" else None


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Undo what Numba's thread functions do to torch: they share OpenMP, and its thread count is reset."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    try:
        yield
    finally:
        if torch is not None and torch.get_num_threads() != before:
            torch.set_num_threads(before)
