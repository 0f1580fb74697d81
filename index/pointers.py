"""Addresses as pointers, for kernels that find the arrays of many sequences in a table."""

from __future__ import annotations

import functools
from typing import Any

import numba

from kvstore.index.loads import intrinsic


@functools.cache
def pointer_to(name: str) -> Any:
    """Return an intrinsic that turns an int64 address into a pointer to numbers of a type, for `numba.carray`.

    name: of the type, "uint8" for example; text, because the cache of compiled kernels tells closures apart by it.
    """

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        """Say the types of a call, and how it is compiled."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            """Write the LLVM code of a call."""
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return numba.types.CPointer(getattr(numba.types, name))(numba.types.int64), generate

    return pointer
