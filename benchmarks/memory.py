"""Memory that one way of running a model takes, each measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Usage:
    """Memory of one run.

    Attributes:
        peak_bytes: largest resident size of the process from the beginning of the prompt on: interpreter,
            libraries, weights, activations and cache.
        held_bytes: allocated for keys and values at the end, and for an index where there is one.
    """

    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Probe:
    """What to run in the process.

    Attributes:
        load: returns the model; found by name in the new process, so not a lambda.
        engine: a name of `benchmarks.engines`.
        budget: of the store's decoded tokens.
        ids: tokens of the text.
        n_prompt: how many of them are the prompt; the rest is decoded one by one.
        threads: of torch.
    """

    load: Callable[[], Any]
    engine: str
    budget: float | None
    ids: list[int]
    n_prompt: int
    threads: int


def measure_memory(probe: Probe) -> Usage:
    """Run a probe in a fresh process and return what it took."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run_probe, probe).result()


def run_probe(probe: Probe) -> Usage:
    """Run a probe in this process, whose peak so far is forgotten where the system allows it."""
    import torch

    from benchmarks.engines import StoreEngine, make_engine

    torch.set_num_threads(probe.threads)
    engine = make_engine(probe.engine, probe.load())
    ids = torch.tensor(probe.ids)
    with engine.active():
        engine.start(WARM_UP_TOKENS + 1)
        engine.forward(ids[:WARM_UP_TOKENS])  # the weights are read, the libraries have started
        engine.close()
        forget_peak()
        engine.start(len(ids))
        engine.forward(ids[: probe.n_prompt])
        if isinstance(engine, StoreEngine):
            engine.set_budget(probe.budget)
        for i in range(probe.n_prompt, len(ids)):
            engine.forward(ids[i : i + 1])
    usage = Usage(peak_bytes(), engine.held_bytes())
    engine.close()
    return usage


def forget_peak() -> None:
    """Give freed memory back and set the process' peak to what is resident now, where Linux allows that."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_bytes() -> int:
    """Largest resident size of this process, since `forget_peak` or since it began."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):  # unlike ru_maxrss it does not begin with the parent's size
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
