"""Which models the store can serve."""

from __future__ import annotations

from typing import Any

import transformers

from kvstore.errors import UnsupportedModelError


def text_config(model_or_config: Any) -> Any:
    """Return the configuration of the language model inside a model or a configuration."""
    return getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)


def model_class(model_or_config: Any) -> Any:
    """Return the class of the model, or of the one that transformers makes from a configuration, or None."""
    if hasattr(model_or_config, "forward"):
        return type(model_or_config)
    config_class = type(text_config(model_or_config))
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    return cls or transformers.MODEL_MAPPING.get(config_class, None)


def check_supported(model_or_config: Any) -> None:
    """Raise `UnsupportedModelError` when the model's attention cannot be served by the store."""
    config = text_config(model_or_config)
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; StoreCache serves decoder-only models")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{name} keeps compressed latents instead of keys (multi-head latent attention, kv_lora_rank="
            f"{config.kv_lora_rank}); StoreCache needs keys and values a head. Use DynamicCache for this model"
        )
    cls = model_class(model_or_config)
    if not getattr(cls, "_supports_default_dynamic_cache", lambda: True)():
        raise UnsupportedModelError(
            f"{name} keeps its state in a cache class of its own, so StoreCache cannot take its place"
        )
    if not getattr(cls, "_can_set_attn_implementation", lambda: True)():
        raise UnsupportedModelError(
            f"{name} computes attention inside the model, not through transformers' attention interface (models with "
            "ALiBi do), so the store cannot answer its queries. Use DynamicCache for this model"
        )
