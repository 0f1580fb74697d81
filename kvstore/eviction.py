"""Dropping sequences that nobody uses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.validate import is_integer

if TYPE_CHECKING:
    from kvstore.store import KVStore


def evict(store: KVStore, max_bytes: int | None, idle_s: float | None) -> list[str]:
    """See `KVStore.evict`; O(sequences), and what dropping takes."""
    _check(max_bytes, idle_s)
    now, dropped = time.time(), []
    for used_s, name in sorted((_last_used(store, name), name) for name in store if _may_go(store, name)):
        is_old = idle_s is not None and now - used_s >= idle_s
        if is_old or (max_bytes is not None and _held_bytes(store) > max_bytes):
            store.drop(name)
            dropped.append(name)
    if dropped:
        _held_bytes(store)  # their records are gone when this returns
    return dropped


def _may_go(store: KVStore, name: str) -> bool:
    """Whether a sequence is kept by the store and not in the middle of a step."""
    seq = store._sequences.get(name)
    return seq is None or (seq.keep and not seq.step_open)


def _last_used(store: KVStore, name: str) -> float:
    seq = store._sequences.get(name)
    if seq is not None:
        return seq._used_s
    assert store._persistence is not None
    return store._persistence.last_used.get(name)


def _held_bytes(store: KVStore) -> int:
    """Bytes of records, those that wait to be written included; of the heap for a store in memory."""
    if store._persistence is None:
        return store.heap.used_bytes
    return store._persistence.settled_bytes()


def _check(max_bytes: int | None, idle_s: float | None) -> None:
    if max_bytes is None and idle_s is None:
        raise ConfigError("say max_bytes, idle_s or both; otherwise nothing would be evicted")
    if max_bytes is not None and (not is_integer(max_bytes) or max_bytes < 0):
        raise ConfigError(f"max_bytes must be a number of bytes from 0 on, not {max_bytes!r}")
    if idle_s is not None and not 0 <= idle_s < float("inf"):
        raise ConfigError(f"idle_s must be seconds from 0 on, not {idle_s!r}")
