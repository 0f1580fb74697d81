"""FAISS, imported when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.errors import ConfigError


def load_faiss(wanted_by: str) -> Any:
    """Return FAISS' module; raises `ConfigError` that says what wanted it when it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(f"{wanted_by} needs FAISS: pip install faiss-cpu") from error
    return faiss


@contextmanager
def one_thread(wanted_by: str) -> Iterator[Any]:
    """Give FAISS' module; until the end of the block FAISS uses one thread, so that its sums have one order."""
    faiss = load_faiss(wanted_by)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(before)
