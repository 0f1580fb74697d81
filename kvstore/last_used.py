"""When each sequence of a directory was last used, for `KVStore.evict`."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

from kvstore.errors import CorruptStoreError
from kvstore.logs import log, log_event
from kvstore.storage.files import read_capped, write_atomic

LAST_USED_NAME = "last_used.json"
MAX_BYTES = 64 << 20


class LastUsed:
    """Unix times by name, kept in a file that no store needs: what it does not know counts as used when it was opened.

    A clock that was set back makes sequences look younger than they are, never older.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LAST_USED_NAME
        self._opened_s = time.time()
        self._times = self._read()

    def get(self, name: str) -> float:
        """Return when a sequence was last used, seconds since 1970."""
        return self._times.get(name, self._opened_s)

    def note(self, name: str, unix_s: float) -> None:
        """Say when a sequence was used."""
        self._times[name] = unix_s

    def write(self, names: Iterable[str]) -> None:
        """Keep the times of these; raises `StorageError`. Does not wait for the disk."""
        self._times = {name: self.get(name) for name in names}
        write_atomic(self._path, json.dumps(self._times).encode(), sync=False)

    def _read(self) -> dict[str, float]:
        try:
            plain = json.loads(read_capped(self._path, MAX_BYTES))
            return {name: _time(value) for name, value in plain.items()}
        except FileNotFoundError:
            return {}
        except (CorruptStoreError, ValueError, TypeError, AttributeError, RecursionError) as error:
            text = "%(path)s is damaged, all sequences count as just used: %(reason)s"
            log_event(log, logging.WARNING, "last_used.damaged", text, path=str(self._path), reason=str(error))
            return {}


def _time(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no time")
    return float(value)
