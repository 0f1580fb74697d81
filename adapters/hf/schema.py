"""The schema of a store that holds a model's full attention layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from kvstore import Schema
from kvstore.adapters.hf.rope import rope_specs
from kvstore.adapters.hf.support import text_config
from kvstore.errors import UnsupportedModelError
from kvstore.schema import DTYPES

# Say where and how a model was loaded, not what its rows mean.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


WEIGHTS_SEEN = 16  # numbers of each parameter


def schema_of(model_or_config: Any, layers: Sequence[int], *, weights: bool = False) -> Schema:
    """Return the schema of the model's layers with these numbers (all of full attention, of one shape).

    With `weights` the fingerprint also tells models apart that differ in their weights only, if there is a model.
    Raises `UnsupportedModelError` when the layers differ in shape or the dtype cannot be stored.
    """
    config = text_config(model_or_config)
    shapes = {_shape(config, layer) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"{config.model_type}: full attention layers of different shapes (query heads, KV heads, key and value "
            f"dimension): {sorted(shapes)}; one store holds one shape"
        )
    n_q_heads, n_kv_heads, head_dim, value_dim = shapes.pop()
    return Schema(
        n_layers=len(layers),
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=_dtype(model_or_config),
        rope=rope_specs(model_or_config, layers),
        fingerprint=fingerprint(config) + (_weights_part(model_or_config) if weights else ""),
    )


def fingerprint(config: Any) -> str:
    """Return a name for the model's shape: its type and a hash of its configuration (not of its weights)."""
    facts = {name: value for name, value in config.to_dict().items() if name not in _NOT_IDENTITY}
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def same_model(one: str, other: str) -> bool:
    """Whether two fingerprints can be those of one model: weights count where both know them."""
    (one_shape, _, one_weights), (other_shape, _, other_weights) = one.partition("+"), other.partition("+")
    return one_shape == other_shape and (not one_weights or not other_weights or one_weights == other_weights)


def _weights_part(model: Any) -> str:
    """Return "+" and a hash of a few numbers of every parameter, "" without a model: milliseconds for any size.

    A fine-tuned model differs in most parameters, so a few numbers of each are enough to tell it from its base.
    """
    if not isinstance(model, torch.nn.Module):
        return ""
    seen = hashlib.blake2b(digest_size=8)
    for name, parameter in sorted(model.named_parameters()):
        seen.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta and parameter.numel():
            at = torch.arange(WEIGHTS_SEEN, device=parameter.device) * (parameter.numel() - 1) // (WEIGHTS_SEEN - 1)
            seen.update(parameter.detach().flatten()[at].float().cpu().numpy().tobytes())
    return f"+{seen.hexdigest()}"


def _shape(config: Any, layer: int) -> tuple[int, int, int, int]:
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is not None:
        config = per_layer[layer]
    n_q_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_q_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_q_heads
    if per_layer is None:  # how models with two shapes said it before configurations were per layer
        n_kv_heads = getattr(config, "num_global_key_value_heads", None) or n_kv_heads
        head_dim = getattr(config, "global_head_dim", None) or head_dim
    return n_q_heads, n_kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim


def _dtype(model_or_config: Any) -> str:
    dtype = getattr(model_or_config, "dtype", None) or text_config(model_or_config).dtype or torch.float32
    for name, known in DTYPES.items():
        if dtype in (known, name):
            return name
    raise UnsupportedModelError(f"keys and values of {dtype} cannot be stored; load the model as {', '.join(DTYPES)}")
