"""Named arrays and small notes as bytes that nobody need vouch for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptStoreError

Arrays = dict[str, npt.NDArray[Any]]
Notes = dict[str, int | float | str | bool | None]
DTYPES = {"uint8": "<u1", "uint16": "<u2", "int64": "<i8", "float32": "<f4", "float64": "<f8"}
MAX_ARRAYS = 64
MAX_AXES = 8
MAX_BYTES = 1 << 32
_NOTE_TYPES = (int, float, str, bool, type(None))


def encode_arrays(arrays: Mapping[str, npt.NDArray[Any]], notes: Notes) -> bytes:
    """Return arrays of the dtypes in `DTYPES`, and notes, as msgpack; raises `ConfigError` for others."""
    plain = {}
    for name, array in arrays.items():
        dtype = str(array.dtype)
        if dtype not in DTYPES or array.ndim > MAX_AXES:
            raise ConfigError(f"array {name!r} of {dtype} with {array.ndim} axes cannot be stored")
        plain[name] = [dtype, list(array.shape), np.ascontiguousarray(array, DTYPES[dtype]).tobytes()]
    data: bytes = msgpack.packb([notes, plain], use_bin_type=True)
    return data


def decode_arrays(data: bytes) -> tuple[Arrays, Notes]:
    """Return what `encode_arrays` was given; raises `CorruptStoreError` for anything that it would not write."""
    try:
        notes, plain = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_map_len=MAX_ARRAYS, max_array_len=MAX_ARRAYS, max_ext_len=0,
            max_str_len=4096, max_bin_len=min(len(data), MAX_BYTES),
        )  # fmt: skip
        if not isinstance(notes, dict) or not all(type(value) in _NOTE_TYPES for value in notes.values()):
            raise ValueError("notes that are none")
        return {name: _array(*entry) for name, entry in plain.items()}, notes
    except Exception as error:  # msgpack raises many classes, and all mean this
        raise CorruptStoreError(f"stored arrays are damaged: {type(error).__name__}: {error}") from None


def _array(dtype: Any, shape: Any, data: Any) -> npt.NDArray[Any]:
    if dtype not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_AXES or type(data) is not bytes:
        raise ValueError(f"an array of {dtype!r}, shape {shape!r}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"an array of shape {shape}")
    kind = np.dtype(DTYPES[dtype])
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and {dtype} in {len(data)} bytes")
    return np.frombuffer(data, kind).reshape(shape).astype(dtype)
