"""How every Numba kernel of this project is compiled.

One decorator, so that the rules hold everywhere: no Python objects, the GIL released, a fast-math subset that
keeps NaN and infinity meaningful, C division, and a cache on disk that never makes a call fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import numba

from kvstore.index.jit_cache import KernelCache

FASTMATH = frozenset({"reassoc", "contract", "nsz"})
"""Sums may be reordered and fused (that is what lets LLVM vectorise them); `nnan` and `ninf` stay off, as
with them `x != x` and comparisons with -inf mean nothing."""

STRICT = frozenset({"contract", "nsz"})
"""No reordering: for kernels whose results must not depend on how a loop was split."""


@overload
def jit(function: Callable[..., Any]) -> Any: ...


@overload
def jit(
    *, parallel: bool = ..., fastmath: frozenset[str] = ..., cache: bool = ...
) -> Callable[[Callable[..., Any]], Any]: ...


def jit(
    function: Callable[..., Any] | None = None,
    *,
    parallel: bool = False,
    fastmath: frozenset[str] = FASTMATH,
    cache: bool = True,
) -> Any:
    """Compile `function` with Numba on its first call; use as `@jit` or `@jit(parallel=True)`.

    `parallel=True` lets `numba.prange` loops run on Numba's threads; call such a kernel through
    `kvstore.index.threads.run_parallel`. `cache=False` keeps a kernel off the disk. Nothing is compiled, and
    no directory is made, before the first call.
    """

    def decorate(inner: Callable[..., Any]) -> Any:
        """Wrap the function in Numba's dispatcher."""
        dispatcher = numba.njit(
            nogil=True,
            parallel=parallel,
            fastmath=set(fastmath),
            error_model="numpy",
            boundscheck=False,
        )(inner)
        if cache and hasattr(dispatcher, "_cache"):  # absent under NUMBA_DISABLE_JIT
            dispatcher._cache = KernelCache(inner, (parallel, sorted(fastmath)))
        return dispatcher

    return decorate(function) if function is not None else decorate
