"""The machine that a benchmark runs on, in plain values."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numba", "numpy", "transformers")


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, versions and threads, and how busy the machine was as the run began."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "usable_cores": _usable_cores(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        **_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average": _load_average(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _threads() -> dict[str, int]:
    import numba
    import torch

    return {"torch_threads": torch.get_num_threads(), "numba_threads": int(numba.config.NUMBA_NUM_THREADS)}


def _load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
