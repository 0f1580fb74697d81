"""Cutting rows into chunks that do not depend on the number of threads."""

from __future__ import annotations

from typing import Any

from kvstore.index.jit import jit

CHUNK_ROWS = 4096
"""Rows a task takes: few enough to spread 3 heads over 2 threads, many enough to repay its set-up."""


@jit
def count_chunks(n: Any) -> Any:
    """Return into how many chunks n rows are cut, at least 1."""
    return max(1, n // CHUNK_ROWS)


@jit
def chunk_bounds(n: Any, n_chunks: Any, chunk: Any) -> Any:
    """Return the first row of a chunk and one past its last; chunks are as equal as can be."""
    return n * chunk // n_chunks, n * (chunk + 1) // n_chunks
