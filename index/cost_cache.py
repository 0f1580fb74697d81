"""Fitted cost models on disk, one file a machine and kind of training."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvstore.index.cost_model import ClusteringCost

FORMAT = 1


def machine_fingerprint(**settings: Any) -> dict[str, str]:
    """Return what the speed of training depends on: processor, cores, versions, and the settings given."""
    machine = {"format": str(FORMAT), "cpu": _cpu_model(), "cores": str(_cores())}
    machine |= {package: _version(package) for package in ("numba", "torch")}
    return machine | {name: repr(value) for name, value in sorted(settings.items())}


def cached_clustering(
    fingerprint: dict[str, str], fit: Callable[[], ClusteringCost], directory: Path | None = None
) -> ClusteringCost:
    """Return the model stored for this fingerprint, or fit one and store it.

    A file that is missing, broken or of another fingerprint means a fit. `directory` defaults to the user's cache; one
    that cannot be written only means that nothing is stored.
    """
    try:
        directory = directory if directory is not None else _user_directory()
    except RuntimeError:  # there is no home directory
        return fit()
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:32]
    path = directory / f"clustering-{digest}.json"
    found = _read(path, fingerprint)
    if found is None:
        found = fit()
        _write(path, {"fingerprint": fingerprint, "cost": asdict(found)})
    return found


def _read(path: Path, fingerprint: dict[str, str]) -> ClusteringCost | None:
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored["fingerprint"] != fingerprint:
            return None
        cost = stored["cost"]
        found = ClusteringCost(float(cost["start_s"]), float(cost["row_s"]), int(cost["limit_rows"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    sound = math.isfinite(found.start_s) and math.isfinite(found.row_s) and found.row_s >= 0 and found.limit_rows >= 0
    return found if sound else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a whole file or none: readers may be other processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)


def _user_directory() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME")
    return (Path(configured) if configured else Path.home() / ".cache") / "kvstore" / "costs"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
