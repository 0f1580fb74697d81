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


def schema_of(model_or_config: Any, layers: Sequence[int]) -> Schema:
    """Return the schema of the model's layers with these numbers (all of full attention, of one shape).

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
        fingerprint=fingerprint(config),
    )


def fingerprint(config: Any) -> str:
    """Return a name for the model's shape: its type and a hash of its configuration (not of its weights)."""
    facts = {name: value for name, value in config.to_dict().items() if name not in _NOT_IDENTITY}
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


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
