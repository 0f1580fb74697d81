"""Named arrays in one file, in the format of safetensors (v0.4): a JSON header, then raw numbers.

Written here because the engine depends on no model framework, and reading the format takes a page.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import SchemaMismatchError
from kvstore.storage.files import disk_error, write_atomic

Arrays = dict[str, npt.NDArray[np.float32]]
MAX_HEADER_BYTES = 16 << 20


def write_tensors(path: str | os.PathLike[str], arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write float32 arrays and text under their names; the file appears whole or not at all.

    Raises `StorageError` or `ReadOnlyStoreError`.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers begin aligned
    write_atomic(Path(path), b"".join([struct.pack("<Q", len(text)), text, *map(_bytes, arrays.values())]))


def read_tensors(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays and the text of a file; raises `SchemaMismatchError` when it is torn or not of this format.

    A file that is not there raises `FileNotFoundError`, one that cannot be read `StorageError`.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_error(f"{path} cannot be read", error) from error
    try:
        (n,) = struct.unpack_from("<Q", data)
        if n > min(MAX_HEADER_BYTES, len(data) - 8):
            raise ValueError(f"a header of {n} bytes in a file of {len(data)}")
        header = json.loads(data[8 : 8 + n])
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise ValueError("metadata that is not text")
        arrays = {name: _array(entry, data, 8 + n) for name, entry in header.items()}
        if sum(array.nbytes for array in arrays.values()) != len(data) - 8 - n:
            raise ValueError("numbers are missing or too many")
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SchemaMismatchError(f"{path} is damaged or not a file of tensors: {error}") from error
    return arrays, metadata


def _bytes(array: npt.NDArray[np.float32]) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()


def _array(entry: dict[str, Any], data: bytes, base: int) -> npt.NDArray[np.float32]:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    sizes_fit = all(type(x) is int and x >= 0 for x in (*shape, start, stop)) and stop - start == 4 * math.prod(shape)
    if entry["dtype"] != "F32" or not sizes_fit or base + stop > len(data):
        raise ValueError(f"an array {entry}")
    return np.frombuffer(data, "<f4", math.prod(shape), base + start).reshape(shape).astype(np.float32)
