"""The RoPE of a model's layers, read from its own rotary embedding and checked against its own rotation."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from kvstore.adapters.hf.support import model_class, text_config
from kvstore.index.rope import RopeSpec

# Their angles depend on the length of the text, so one spec cannot undo them.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Hybrids whose full attention layers carry no position: `layer_types` does not say so.
_NOPE_WHEN_HYBRID = ("cohere2", "exaone4", "exaone4_5_text", "exaone4_5", "exaone_moe", "kolibri1")
_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


def rope_specs(model_or_config: Any, layers: Iterable[int]) -> tuple[RopeSpec | None, ...]:
    """Return the RopeSpec of each of the model's layers with these numbers; None where it is not known for certain."""
    config = text_config(model_or_config)
    rotary = _rotary(model_or_config, config)
    known: dict[str | None, RopeSpec | None] = {}
    specs = []
    for layer in layers:
        layer_type = _layer_type(rotary, config, layer)
        if layer_type not in known:
            known[layer_type] = None if rotary is None else _spec(rotary, layer_type)
        specs.append(known[layer_type] if _has_rope(config, layer) else None)
    return tuple(specs)


def _rotary(model_or_config: Any, config: Any) -> Any:
    """Return the rotary embedding module of the language model, built anew from a bare configuration, or None."""
    if hasattr(model_or_config, "modules"):
        found = [m for m in model_or_config.modules() if _is_rotary(type(m)) and getattr(m, "config", None) is config]
        return found[0] if len(found) == 1 else None
    module_name = getattr(model_class(config), "__module__", "")
    for cls in tuple(vars(sys.modules[module_name]).values()) if module_name else ():
        if isinstance(cls, type) and cls.__module__ == module_name and _is_rotary(cls):
            try:
                return cls(config)
            except _ERRORS:
                continue
    return None


def _is_rotary(cls: type) -> bool:
    return cls.__name__.endswith("RotaryEmbedding") and "Vision" not in cls.__name__


def _layer_type(rotary: Any, config: Any, layer: int) -> str | None:
    """Return the layer's type where the rotary embedding has one set of angles a type (Gemma 3), else None."""
    return config.layer_types[layer] if isinstance(getattr(rotary, "rope_type", None), dict) else None


def _has_rope(config: Any, layer: int) -> bool:
    flags = getattr(config, "no_rope_layers", None)  # 1 where the layer has RoPE, whatever the name says
    if flags:
        return bool(flags[layer])
    types = getattr(config, "layer_types", None) or []
    hybrid = "sliding_attention" in types and config.model_type in _NOPE_WHEN_HYBRID
    return not (hybrid and types[layer] == "full_attention")


def _spec(rotary: Any, layer_type: str | None) -> RopeSpec | None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    try:
        kind: Any = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
        if kind in _LENGTH_DEPENDENT:
            return None
        inv_freq = tuple(getattr(rotary, f"{prefix}inv_freq").float().tolist())
        factor = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
        for layout in ("half", "interleaved"):
            spec = RopeSpec(inv_freq, layout, factor)
            if _agrees(rotary, layer_type, spec):
                return spec
    except _ERRORS:  # an embedding of another shape: not known, and the index takes the keys as they are
        pass
    return None


@torch.no_grad()
def _agrees(rotary: Any, layer_type: str | None, spec: RopeSpec) -> bool:
    """Rotate one set of keys with the model's own functions and with spec, and compare."""
    positions = torch.tensor([[0, 1, 7, 100]])
    keys = torch.linspace(-1, 1, 4 * spec.rotary_dim).sin().view(1, 1, 4, spec.rotary_dim)
    cos, sin = rotary(keys, positions) if layer_type is None else rotary(keys, positions, layer_type)
    rotate = sys.modules[type(rotary).__module__].apply_rotary_pos_emb
    try:
        rotated = rotate(keys, keys, cos, sin)[1]
    except _ERRORS:  # the form that takes queries and keys one at a time
        rotated = rotate(keys, cos, sin)
    return torch.allclose(rotated, rotated_keys(keys, positions[0], spec), atol=1e-4)


def rotated_keys(keys: torch.Tensor, positions: torch.Tensor, spec: RopeSpec, inverse: bool = False) -> torch.Tensor:
    """Rotate keys, float [..., n, head_dim], to their positions, int64 [n], or with inverse back from them."""
    angles = positions[:, None].double() * torch.tensor(spec.inv_freq, dtype=torch.float64)
    factor = 1 / spec.attention_factor if inverse else spec.attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * (-factor if inverse else factor)
    n, out = len(spec.inv_freq), keys.double().clone()
    even, odd = (slice(0, n), slice(n, 2 * n)) if spec.layout == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out[..., even] = keys[..., even] * cos - keys[..., odd] * sin
    out[..., odd] = keys[..., odd] * cos + keys[..., even] * sin
    return out.to(keys.dtype)
