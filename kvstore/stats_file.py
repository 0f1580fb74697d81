"""The last statistics of a store, left in its directory for who looks at it from outside.

The file is a courtesy: no store needs it to be opened, and one that is damaged or missing only means that there are no
statistics.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvstore.errors import CorruptStoreError
from kvstore.stats import Counters, StoreStats
from kvstore.storage.files import read_capped, write_atomic

STATS_NAME = "stats.json"
MAX_STATS_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SavedStats:
    """Statistics as a writer left them.

    Attributes:
        stats: of the store in that process.
        unix_time_s: when they were written, seconds since 1970. pid: of the process that wrote them.
    """

    stats: StoreStats
    unix_time_s: float
    pid: int

    @property
    def age_s(self) -> float:
        """Seconds since they were written, 0 where the clock was set back."""
        return max(0.0, time.time() - self.unix_time_s)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values: what the file holds."""
        return {"unix_time_s": self.unix_time_s, "pid": self.pid, "stats": self.stats.as_dict()}


def write_stats(folder: Path, stats: StoreStats) -> None:
    """Replace the statistics in a directory, whole or not at all; raises `StorageError` or `ReadOnlyStoreError`.

    Does not wait for the disk: a loss of power may take the file.
    """
    saved = SavedStats(stats, time.time(), os.getpid())
    write_atomic(folder / STATS_NAME, json.dumps(saved.as_dict(), indent=1).encode(), sync=False)


def read_stats(folder: Path) -> SavedStats | None:
    """Return the statistics in a directory, None where there are none; raises `CorruptStoreError`, `StorageError`."""
    path = folder / STATS_NAME
    try:
        return _parse(json.loads(read_capped(path, MAX_STATS_BYTES)))
    except FileNotFoundError:
        return None
    except CorruptStoreError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptStoreError(f"{path} is damaged ({error!r}); the next flush replaces it") from None


def _parse(plain: dict[str, Any]) -> SavedStats:
    stats, counters = plain["stats"], plain["stats"]["counters"]
    counted = Counters(attends=_counts(counters["attends"]), **_numbers(Counters, counters))
    found = StoreStats(counters=counted, **_numbers(StoreStats, stats))
    return SavedStats(found, _number(plain["unix_time_s"], float), _number(plain["pid"], int))


def _counts(plain: dict[str, Any]) -> dict[str, int]:
    return {str(name): _number(value, int) for name, value in plain.items()}


def _numbers(kind: type[Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return those fields of a dataclass that are numbers; what else a newer version has added does no harm."""
    types = {"int": int, "float": float}
    return {f.name: _number(plain[f.name], types[f.type]) for f in fields(kind) if f.type in types}


def _number(value: Any, kind: type[Any]) -> Any:
    if type(value) not in (int, kind) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no {kind.__name__} from 0 on")
    return kind(value)
