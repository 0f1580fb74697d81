"""Kinds of index by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from kvstore.errors import ConfigError
from kvstore.index.base import Index

ENTRY_POINTS = "kvstore.indexes"
"""Entry-point group in which other packages announce kinds: `name = "package.module:factory"`."""

Factory = Callable[..., Index]


def _flat(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.flat import FlatIndex

    return FlatIndex(n_kv_heads, head_dim, **settings)


def _pq(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.pq import PQIndex

    return PQIndex(n_kv_heads, head_dim, **settings)


def _sq4(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.scalar import ScalarIndex

    return ScalarIndex(n_kv_heads, head_dim, bits=4, **settings)


def _sq8(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.scalar import ScalarIndex

    return ScalarIndex(n_kv_heads, head_dim, bits=8, **settings)


def _faiss(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.faiss_index import FaissIndex

    return FaissIndex(n_kv_heads, head_dim, **settings)


def _page(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.page import PageIndex

    return PageIndex(n_kv_heads, head_dim, **settings)


def _rabitq(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.rabitq import RaBitQIndex

    return RaBitQIndex(n_kv_heads, head_dim, **settings)


def _sparq(n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    from kvstore.index.sparq import SparQIndex

    return SparQIndex(n_kv_heads, head_dim, **settings)


_factories: dict[str, Factory] = {
    "faiss": _faiss,
    "flat": _flat,
    "pq": _pq,
    "page": _page,
    "rabitq": _rabitq,
    "sparq": _sparq,
    "sq4": _sq4,
    "sq8": _sq8,
}


def register_index(name: str, factory: Factory) -> None:
    """Make `make_index(name, ...)` call `factory(n_kv_heads, head_dim, **settings)`.

    Raises `ConfigError` when the name is taken by another factory.
    """
    if _factories.setdefault(name, factory) is not factory:
        raise ConfigError(f"an index kind named {name!r} exists already; choose another name")


def make_index(name: str, n_kv_heads: int, head_dim: int, **settings: Any) -> Index:
    """Return a new, empty index of the kind: built in, registered, or announced as an entry point.

    Raises `ConfigError` for an unknown name, and whatever the kind raises for its settings.
    """
    factory = _factories.get(name)
    if factory is None:
        announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in announced:
            known = ", ".join(sorted({*_factories, *announced}))
            raise ConfigError(f"unknown kind of index {name!r}; known are {known}")
        factory = announced[name].load()
        register_index(name, factory)
    return factory(n_kv_heads, head_dim, **settings)


def index_kinds() -> list[str]:
    """Names that `make_index` knows, entry points included."""
    return sorted({*_factories, *(point.name for point in entry_points(group=ENTRY_POINTS))})
