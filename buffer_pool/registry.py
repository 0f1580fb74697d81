"""Replacement policies by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from kvstore.buffer_pool.policy import Policy
from kvstore.errors import ConfigError

ENTRY_POINTS = "kvstore.policies"
"""Entry-point group in which other packages announce policies: `name = "package.module:factory"`."""

Factory = Callable[..., Policy]


def _arc(n_frames: int, **settings: Any) -> Policy:
    from kvstore.buffer_pool.arc import ARC

    return ARC(n_frames, **settings)


def _clock(n_frames: int, **settings: Any) -> Policy:
    from kvstore.buffer_pool.clock import Clock

    return Clock(n_frames, **settings)


def _lfu(n_frames: int, **settings: Any) -> Policy:
    from kvstore.buffer_pool.lfu import LFU

    return LFU(n_frames, **settings)


def _lru(n_frames: int, **settings: Any) -> Policy:
    from kvstore.buffer_pool.lru import LRU

    return LRU(n_frames, **settings)


def _score_decay(n_frames: int, **settings: Any) -> Policy:
    from kvstore.buffer_pool.score_decay import ScoreDecay

    return ScoreDecay(n_frames, **settings)


_factories: dict[str, Factory] = {"arc": _arc, "clock": _clock, "lfu": _lfu, "lru": _lru, "score-decay": _score_decay}


def register_policy(name: str, factory: Factory) -> None:
    """Make `make_policy(name, ...)` call `factory(n_frames, **settings)`.

    Raises `ConfigError` when the name is taken by another factory.
    """
    if _factories.setdefault(name, factory) is not factory:
        raise ConfigError(f"a replacement policy named {name!r} exists already; choose another name")


def make_policy(name: str, n_frames: int, **settings: Any) -> Policy:
    """Return a new policy that follows no frame yet: built in, registered, or announced as an entry point.

    Raises `ConfigError` for an unknown name, and for settings that the policy does not have.
    """
    factory = _factories.get(name)
    if factory is None:
        announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in announced:
            known = ", ".join(sorted({*_factories, *announced}))
            raise ConfigError(f"unknown replacement policy {name!r}; known are {known}")
        factory = announced[name].load()
        register_policy(name, factory)
    try:
        return factory(n_frames, **settings)
    except TypeError as error:
        raise ConfigError(f"policy {name!r} cannot be made with the settings {settings}: {error}") from error


def policy_names() -> list[str]:
    """Names that `make_policy` knows, entry points included."""
    return sorted({*_factories, *(point.name for point in entry_points(group=ENTRY_POINTS))})
