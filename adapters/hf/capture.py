"""Recording keys, values and queries of a model while it reads a text, as traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from kvstore.adapters.hf.compat import cache_argument
from kvstore.adapters.hf.dense import dense_attention
from kvstore.adapters.hf.rope import rope_specs, rotated_keys
from kvstore.adapters.hf.support import check_supported, text_config
from kvstore.errors import InvalidQueryError, UnsupportedModelError
from kvstore.index.rope import RopeSpec
from kvstore.traces import Trace

NAME = "kvstore_capture"  # of the attention function
CHUNK_TOKENS = 512
CALIBRATION_QUERIES = 256
DEPTHS = (0.1, 0.48, 0.69, 1.0)
"""Where in the model the layers are that are recorded by default, as shares of its depth."""

Tell = Callable[[str, int, int], None]


@dataclass
class _Recording:
    """What one layer has shown so far; tensors are parts in order of position, [heads, n, dim]."""

    rope: RopeSpec | None
    k: list[torch.Tensor] = field(default_factory=list)
    k_pre: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    scale: float = 0.0


def full_attention_layers(model: Any) -> list[int]:
    """Numbers of the model's layers that attend to all tokens."""
    layers = DynamicCache(config=text_config(model)).layers
    return [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]


def default_layers(model: Any) -> list[int]:
    """Return four layers spread over the model (3, 14, 20, 29 of 30); fewer where it has fewer."""
    layers = full_attention_layers(model)
    return sorted({layers[round((len(layers) - 1) * depth)] for depth in DEPTHS}) if layers else []


def capture(
    model: Any,
    ids: Sequence[int],
    layers: Sequence[int],
    *,
    n_queries: int = 64,
    name: str = "",
    tell: Tell | None = None,
) -> list[Trace]:
    """Run the model over ids and return the trace of each layer, in float32 (files hold float16).

    Kept are the queries of the last n_queries positions, and of up to 256 positions spread over those before.
    Raises `UnsupportedModelError` when a layer does not attend to all tokens or the model's attention cannot be
    exchanged, `InvalidQueryError` when ids are too few.
    """
    check_supported(model)
    _check(model, ids, layers, n_queries)
    specs = rope_specs(model, layers)
    recordings = {layer: _Recording(spec) for layer, spec in zip(layers, specs, strict=True)}
    wanted = _query_positions(len(ids), n_queries)
    with _recorded(model, recordings, wanted):
        _read(model, ids, tell or (lambda *_: None))
    return [_trace(recordings[layer], layer, wanted, n_queries, name) for layer in layers]


def _check(model: Any, ids: Sequence[int], layers: Sequence[int], n_queries: int) -> None:
    known = full_attention_layers(model)
    strange = sorted(set(layers) - set(known))
    if strange or not layers:
        raise UnsupportedModelError(
            f"no layers {strange} that attend to all tokens; the model's are {', '.join(map(str, known)) or 'none'}"
        )
    if len(set(layers)) != len(layers):
        raise InvalidQueryError(f"layers are named twice: {list(layers)}")
    if n_queries < 1 or len(ids) < 2 * n_queries:
        raise InvalidQueryError(f"{len(ids)} tokens are too few for {n_queries} queries; take at least twice as many")


def _query_positions(n: int, n_queries: int) -> npt.NDArray[np.int64]:
    """Positions whose queries are kept, ascending: the calibration ones, then the last n_queries."""
    earlier = np.linspace(min(64, n_queries), n - 2 * n_queries, CALIBRATION_QUERIES)
    spread = np.unique(earlier.astype(np.int64).clip(0, n - n_queries - 1))
    return np.concatenate([spread, np.arange(n - n_queries, n)])


@contextmanager
def _recorded(model: Any, recordings: dict[int, _Recording], wanted: npt.NDArray[np.int64]) -> Iterator[None]:
    """Let the model attend through a function that records, inside a `with` block."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        recording = recordings.get(getattr(module, "layer_idx", -1))
        if recording is not None:
            _record(recording, query, key, value, scaling, wanted)
        return dense_attention(module, query, key, value, mask, scaling, dropout, kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it transformers would drop every mask
    former = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        if model.config._attn_implementation != NAME:
            raise UnsupportedModelError(f"{type(model).__name__} did not take the attention function {NAME!r}")
        yield
    finally:
        model.set_attn_implementation(former)
        AttentionInterface.register(NAME, dense_attention)  # what was recorded must not stay reachable from it


def _record(
    recording: _Recording,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    wanted: npt.NDArray[np.int64],
) -> None:
    """Keep the newest rows of key and value [1, n_kv_heads, n, dim] and the queries [1, n_q_heads, n_new, dim]."""
    n, n_new = key.shape[2], query.shape[2]
    positions = torch.arange(n - n_new, n)
    keys = key[0, :, n - n_new :].float().cpu()
    recording.k.append(keys)
    if recording.rope is not None:
        recording.k_pre.append(rotated_keys(keys, positions, recording.rope, inverse=True))
    recording.v.append(value[0, :, n - n_new :].float().cpu())
    here = wanted[(wanted >= n - n_new) & (wanted < n)] - (n - n_new)
    recording.q.append(query[0][:, torch.from_numpy(here)].float().cpu())
    recording.scale = float(scaling) if scaling is not None else query.shape[3] ** -0.5


@torch.inference_mode()
def _read(model: Any, ids: Sequence[int], tell: Tell) -> None:
    """Run the model over ids, a chunk at a time: one pass would need the attention scores' memory at once."""
    cache = DynamicCache(config=text_config(model))
    for start in range(0, len(ids), CHUNK_TOKENS):
        tell("reading the text", start, len(ids))
        part = torch.tensor([list(ids[start : start + CHUNK_TOKENS])], device=model.device)
        model(part, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})


def _trace(recording: _Recording, layer: int, wanted: npt.NDArray[np.int64], n_queries: int, name: str) -> Trace:
    if not recording.k:
        raise UnsupportedModelError(f"layer {layer} did not attend through the function that records")
    q = _joined(recording.q)
    return Trace(
        k=_joined(recording.k),
        v=_joined(recording.v),
        q=q[:, -n_queries:],
        k_pre=_joined(recording.k_pre) if recording.k_pre else None,
        q_cal=q[:, :-n_queries],
        cal_pos=wanted[:-n_queries].astype(np.int32),
        rope=recording.rope,
        scale=recording.scale,
        layer=layer,
        model=name,
    )


def _joined(parts: list[torch.Tensor]) -> npt.NDArray[Any]:
    """Return parts [heads, n_i, dim] as one float32 array; a trace's file holds it as float16."""
    array: npt.NDArray[Any] = torch.cat(parts, 1).numpy()
    return array
