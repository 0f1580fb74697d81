"""Recorded keys, values and queries of one layer of a model: what indexes are measured on.

A trace is one safetensors file. The format is plain (a JSON header, then the numbers), so it is read and written
here, without the library: the engine depends on no model framework.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.index.rope import RopeSpec
from kvstore.index.weighting import query_moments

FORMAT = "1"
SUFFIX = ".safetensors"
DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}
_MAX_HEADER_BYTES = 1 << 20
_OLD_ROPE = re.compile(r"(half|interleaved) layout, theta (\d+), no scaling")

Array = npt.NDArray[Any]


class TraceError(KVStoreError, ValueError):
    """Raised when a trace is missing, broken, or does not fit what is asked of it."""


@dataclass(frozen=True)
class Trace:
    """One layer's rows and some of the queries that met them.

    Attributes:
        k: keys after RoPE, float16 [n_kv_heads, n_tokens, head_dim]; row = position.
        v: values, float16 [n_kv_heads, n_tokens, value_dim].
        q: queries after RoPE of the last positions, float16 [n_q_heads, n_queries, head_dim].
        k_pre: keys before RoPE, like k; None where the model's RoPE is not known.
        q_cal: queries of earlier positions, float16 [n_q_heads, n_cal, head_dim]; cal_pos: int32 [n_cal], which.
        rope: what turned k_pre into k, or None. scale: of the softmax. layer: number in the model. model: its name.
    """

    k: Array
    v: Array
    q: Array
    k_pre: Array | None = None
    q_cal: Array | None = None
    cal_pos: Array | None = None
    rope: RopeSpec | None = None
    scale: float = 0.0
    layer: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        if self.k.ndim != 3 or self.v.ndim != 3 or self.q.ndim != 3:
            raise TraceError("k, v and q must have three axes: heads, rows, dimension")
        if self.v.shape[:2] != self.k.shape[:2] or self.q.shape[2] != self.head_dim:
            raise TraceError(f"k {self.k.shape}, v {self.v.shape} and q {self.q.shape} do not fit each other")
        if self.q.shape[0] % self.n_kv_heads or not 0 < self.n_queries <= self.n_tokens:
            raise TraceError(f"{self.q.shape[0]} x {self.n_queries} queries do not fit keys {self.k.shape}")
        if self.k_pre is not None and self.k_pre.shape != self.k.shape:
            raise TraceError(f"k_pre {self.k_pre.shape} is not shaped like k {self.k.shape}")
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            raise TraceError(f"RoPE over {self.rope.rotary_dim} dimensions does not fit keys of {self.head_dim}")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    @property
    def n_kv_heads(self) -> int:
        """KV heads."""
        return int(self.k.shape[0])

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return int(self.q.shape[0]) // self.n_kv_heads

    @property
    def n_tokens(self) -> int:
        """Rows."""
        return int(self.k.shape[1])

    @property
    def head_dim(self) -> int:
        """Numbers in a key."""
        return int(self.k.shape[2])

    @property
    def n_queries(self) -> int:
        """Positions whose queries were kept, the last of the text."""
        return int(self.q.shape[1])

    @cached_property
    def keys(self) -> npt.NDArray[np.float32]:
        """`k` as float32, C-order."""
        return np.ascontiguousarray(self.k, np.float32)

    def queries(self, i: int) -> npt.NDArray[np.float32]:
        """Queries of position n_tokens - n_queries + i, float32 [n_kv_heads, group, head_dim]."""
        q = np.asarray(self.q[:, i], np.float32)
        return np.ascontiguousarray(q.reshape(self.n_kv_heads, self.group, self.head_dim))

    def query_moments(self) -> npt.NDArray[np.float64]:
        """E[q q'] of the calibration queries, float64 [n_kv_heads, head_dim, head_dim]; see `kvstore.index.Weighting`.

        Raises `TraceError` for a trace without calibration queries.
        """
        if self.q_cal is None or self.q_cal.shape[1] == 0:
            raise TraceError(f"the trace of layer {self.layer} has no calibration queries; capture it again")
        return query_moments(np.asarray(self.q_cal, np.float32).reshape(self.n_kv_heads, -1, self.head_dim))


def read_trace(path: Path) -> Trace:
    """Return the trace in a file; raises `TraceError` when it is missing, damaged, or no trace."""
    tensors, notes = _read(path)
    missing = {"k", "v", "q"} - set(tensors)
    if missing:
        raise TraceError(f"{path.name} is no trace: it lacks {', '.join(sorted(missing))}; make one: kvstore capture")
    if notes.get("format", FORMAT) != FORMAT:
        raise TraceError(f"{path.name} has format {notes['format']}, this version reads {FORMAT}; capture it again")
    try:
        scale, layer = float(notes.get("scale", 0)), int(notes.get("layer", 0))
        rope = _read_rope(notes.get("rope", ""), tensors["k"].shape[-1])
    except (TypeError, ValueError, KeyError) as error:
        raise TraceError(f"{path.name}: metadata cannot be read ({error})") from error
    arrays = {name: tensors.get(name) for name in ("k_pre", "q_cal", "cal_pos")}
    k, v, q = (tensors[name] for name in "kvq")
    return Trace(k, v, q, **arrays, rope=rope, scale=scale, layer=layer, model=notes.get("model", path.stem))


def read_traces(directory: Path) -> list[Trace]:
    """Return all traces of a directory by file name; raises `TraceError` when there is none."""
    if not directory.is_dir():
        raise TraceError(f"no traces at {directory}: there is no such directory")
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise TraceError(f"no traces in {directory}: it holds no {SUFFIX} file; make some with kvstore capture")
    return [read_trace(file) for file in files]


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, keys, values and queries as float16; raises `TraceError` for numbers that float16 cannot hold."""
    names = ("k", "v", "q", "k_pre", "q_cal", "cal_pos")
    tensors = {name: _stored(name, getattr(trace, name)) for name in names if getattr(trace, name) is not None}
    notes = {"format": FORMAT, "model": trace.model, "layer": str(trace.layer), "tokens": str(trace.n_tokens)}
    notes |= {"scale": repr(trace.scale), "rope": _rope_note(trace.rope)}
    header: dict[str, Any] = {"__metadata__": notes}
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    at = 0
    for name, array in tensors.items():
        span = [at, at + array.nbytes]
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(path.name + ".part")  # a capture that is stopped leaves no half of a trace
    with draft.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            stream.write(array.tobytes())
    draft.replace(path)


def _read(path: Path) -> tuple[dict[str, Array], Mapping[str, str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    size = int.from_bytes(data[:8], "little")
    try:
        if not 2 <= size <= _MAX_HEADER_BYTES or len(data) < 8 + size:
            raise ValueError("no header")
        header = json.loads(data[8 : 8 + size])
        notes = header.pop("__metadata__", {})
        return {name: _array(data, 8 + size, entry) for name, entry in header.items()}, notes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path.name} is damaged or no safetensors file: {error}") from error


def _array(data: bytes, start: int, entry: Mapping[str, Any]) -> Array:
    dtype, (low, high) = np.dtype(DTYPES[entry["dtype"]]), entry["data_offsets"]
    count = int(np.prod(entry["shape"], dtype=np.int64))
    if not 0 <= low <= high <= len(data) - start or high - low != count * dtype.itemsize:
        raise ValueError("a tensor reaches beyond the file")
    return np.frombuffer(data, dtype.newbyteorder("<"), count, start + low).reshape(entry["shape"])


def _stored(name: str, array: Array) -> Array:
    if name == "cal_pos":
        return np.ascontiguousarray(array, np.int32)
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(array, np.float16)
    if not np.isfinite(half).all():
        raise TraceError(f"{name} holds numbers that float16 cannot hold (or NaN)")
    return half


def _rope_note(rope: RopeSpec | None) -> str:
    if rope is None:
        return ""
    facts = {"inv_freq": list(rope.inv_freq), "layout": rope.layout, "attention_factor": rope.attention_factor}
    return json.dumps(facts)


def _read_rope(note: str, head_dim: int) -> RopeSpec | None:
    """Read a RopeSpec from metadata: JSON, "" for none, or (in traces made elsewhere) plain RoPE in words."""
    if not note:
        return None
    if match := _OLD_ROPE.fullmatch(note):
        return RopeSpec.from_theta(float(match[2]), head_dim, match[1])
    facts = json.loads(note)
    return RopeSpec(tuple(facts["inv_freq"]), facts["layout"], facts["attention_factor"])
