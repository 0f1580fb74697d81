"""How the numbers of rows are written on lower tiers; a record names its encoding.

`raw` keeps every bit. The others lose some and are used only when asked for: `fp16` and `bf16` round to nearest even,
`int8` keeps one float32 scale a row (a key or a value of one head of one token) and 8 bits a number. Per block: the
keys' scales and codes, then the values'. Rows that an encoding cannot hold (not finite, too large for fp16) stay raw.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.storage.shape import ITEM_BYTES, RowShape

Buffer = bytes | bytearray | memoryview
Floats = npt.NDArray[np.float32]
INT8_TOP = 127


class Encoding(IntEnum):
    """Names of encodings as records store them."""

    RAW = 1
    FP16 = 2
    BF16 = 3
    INT8 = 4


def encoding_of(name: str) -> Encoding:
    """Return the encoding of that name in lower case; raises `ConfigError` when there is none."""
    try:
        return Encoding[name.upper()]
    except KeyError:
        names = ", ".join(e.name.lower() for e in Encoding)
        raise ConfigError(f"an encoding must be one of {names}, not {name!r}") from None


def encoded_bytes(shape: RowShape, encoding: Encoding) -> int:
    """Bytes that rows of this shape take in an encoding."""
    dims = shape.key_dim + shape.value_dim
    if encoding is Encoding.RAW:
        return shape.raw_bytes
    if encoding is Encoding.INT8:
        return shape.n_vectors * (dims + 8)
    return shape.n_vectors * dims * 2


def encode_rows(raw: Buffer, shape: RowShape, encoding: Encoding) -> tuple[Encoding, Buffer]:
    """Return the encoding used, RAW when the rows do not fit into the one asked for, and the encoded bytes.

    `raw` holds `shape.raw_bytes` bytes, laid out as `RowShape` says; it is returned itself when it stays raw.
    """
    if len(raw) != shape.raw_bytes:
        raise ConfigError(f"{len(raw)} bytes of rows where {shape} has {shape.raw_bytes}")
    if encoding is Encoding.RAW or (encoding, shape.dtype) in _SAME:
        return Encoding.RAW, raw
    parts: list[bytes] = []
    for rows in _vectors(raw, shape):
        coded = _encode(rows, encoding)
        if coded is None:
            return Encoding.RAW, raw
        parts += coded
    return encoding, b"".join(parts)


def decode_rows(payload: Buffer, shape: RowShape, encoding: Encoding) -> Buffer:
    """Return rows as raw bytes of the shape's dtype; a RAW payload is returned itself."""
    if len(payload) != encoded_bytes(shape, encoding):
        raise ConfigError(f"{len(payload)} bytes of {encoding.name} where {shape} has {encoded_bytes(shape, encoding)}")
    if encoding is Encoding.RAW:
        return payload
    return b"".join(_narrow(rows, shape.dtype).tobytes() for rows in _decoded(payload, shape, encoding))


_SAME = {(Encoding.FP16, "float16"), (Encoding.BF16, "bfloat16")}
_NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def _vectors(raw: Buffer, shape: RowShape) -> Iterator[Floats]:
    """Yield keys and values of each block in turn, float32 [n_heads * block_rows, dim]."""
    at, item_bytes = 0, ITEM_BYTES[shape.dtype]
    n = shape.n_vectors // shape.n_blocks
    for _ in range(shape.n_blocks):
        for dim in (shape.key_dim, shape.value_dim):
            part = np.frombuffer(raw, _NUMPY[shape.dtype], n * dim, at).reshape(n, dim)
            at += n * dim * item_bytes
            yield _from_bf16(part) if shape.dtype == "bfloat16" else part.astype(np.float32)


def _encode(rows: Floats, encoding: Encoding) -> list[bytes] | None:
    """Return scales (int8 only) and codes, or None when the rows do not fit."""
    largest = np.abs(rows).max(initial=0.0)  # NaN if any is
    if not np.isfinite(largest):
        return None
    if encoding is Encoding.FP16:
        with np.errstate(over="ignore"):
            halves = rows.astype("<f2")
        return [halves.tobytes()] if np.isfinite(halves).all() else None
    if encoding is Encoding.BF16:
        patterns = _to_bf16(rows)
        return [patterns.tobytes()] if np.isfinite(_from_bf16(patterns)).all() else None
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(INT8_TOP)
    with np.errstate(over="ignore"):
        if not np.isfinite(scales * INT8_TOP).all():  # the largest floats there are would come back infinite
            return None
    with np.errstate(divide="ignore", invalid="ignore"):  # rows of zeros, and scales that underflow to zero
        codes = np.where(scales > 0, rows / scales, 0)
    return [scales.astype("<f4").tobytes(), np.clip(np.rint(codes), -INT8_TOP, INT8_TOP).astype(np.int8).tobytes()]


def _decoded(payload: Buffer, shape: RowShape, encoding: Encoding) -> Iterator[Floats]:
    at, n = 0, shape.n_vectors // shape.n_blocks
    for _ in range(shape.n_blocks):
        for dim in (shape.key_dim, shape.value_dim):
            if encoding is Encoding.INT8:
                scales = np.frombuffer(payload, "<f4", n, at)[:, None]
                yield np.frombuffer(payload, np.int8, n * dim, at + 4 * n).reshape(n, dim) * scales
                at += n * (dim + 4)
                continue
            part = np.frombuffer(payload, "<f2" if encoding is Encoding.FP16 else "<u2", n * dim, at).reshape(n, dim)
            yield part.astype(np.float32) if encoding is Encoding.FP16 else _from_bf16(part)
            at += n * dim * 2


def _narrow(rows: Floats, dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return _to_bf16(rows)
    with np.errstate(over="ignore"):
        return rows.astype(_NUMPY[dtype])


def _from_bf16(patterns: npt.NDArray[np.uint16]) -> Floats:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(rows: Floats) -> npt.NDArray[np.uint16]:
    """Round finite numbers to nearest even: numpy has no bfloat16."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
