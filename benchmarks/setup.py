"""Threads of every library that a benchmark compares, set alike; call it before torch and Numba are imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.progress import Progress
    from benchmarks.report import Report


def set_threads(count: int) -> None:
    """Let Numba, torch, FAISS and BLAS compute with `count` threads."""
    for name in ("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, str(count))
    import faiss
    import torch

    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)


@contextmanager
def only_threads(count: int) -> Iterator[None]:
    """Let our kernels and FAISS use `count` threads inside a `with` block."""
    import faiss

    from kvstore.index.threads import kernel_threads

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        with kernel_threads(count):
            yield
    finally:
        faiss.omp_set_num_threads(before)


def machine_with_peers() -> dict[str, Any]:
    """Return the machine's description with the versions of the libraries compared."""
    from benchmarks.machine import describe_machine

    peers = {name: metadata.version(package) for name, package in (("faiss", "faiss-cpu"), ("sklearn", "scikit-learn"))}
    return {**describe_machine(), **peers}


@contextmanager
def reported(report: Report, file: Path | None) -> Iterator[Progress]:
    """Give the progress of a run; at its end show the report, and write it to a file if the run is complete."""
    from benchmarks.progress import Progress

    try:
        with Progress() as tell:
            yield tell
    finally:
        show(report)
    if file is not None:
        report.write(file)


def show(report: Report) -> None:
    """Print the rows that a run has so far, if any."""
    from rich.console import Console

    if report.rows:
        console = Console()
        console.print(report.table(), width=None if console.is_terminal else 120)
