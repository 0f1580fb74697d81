"""The attention function that asks the store, and how a model is told to use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvstore.adapters.hf.compat import NAME, take_over
from kvstore.adapters.hf.dense import dense_attention, only_dense
from kvstore.adapters.hf.support import check_supported
from kvstore.errors import UnsupportedModelError


def store_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of transformers over the rows of a `StoreCache`; over any other cache it is transformers' "sdpa".

    query [batch, n_q_heads, n_queries, head_dim], key and value as the cache returned them, attention_mask
    bool [batch, 1, n_queries, n_rows] or None; returns [batch, n_queries, n_q_heads, value_dim] and None. One
    query token a batch row goes to the store, which selects rows; more of them, masks with holes and scores
    with extras (soft caps, sinks, dropout) are computed densely over all rows.
    """
    layer, intact = take_over(key, value, kwargs)
    if layer is None or not intact:
        if layer is not None:
            layer.check_whole(module)
        return dense_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    batch, index = layer.batch, layer.index
    if attention_mask is None or attention_mask.dtype == torch.bool:
        layer.attention_config = module.config
    if index == 0:
        batch.enter(attention_mask)
    if query.shape[2] > 1:
        batch.observe(index, query)
    if layer.is_last:
        batch.finish()
    if query.shape[2] == 1 and batch.selects(attention_mask) and not dropout and not only_dense(kwargs):
        return batch.attend(index, query[:, :, 0], scaling).unsqueeze(1), None
    key, value = batch.whole(index, key, value)
    return dense_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs)


def register() -> None:
    """Make `attn_implementation="kvstore"` known to transformers; may be called any number of times."""
    AttentionInterface.register(NAME, store_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it transformers would drop every mask


@contextmanager
def use_store_attention(model: Any) -> Iterator[Any]:
    """Let the model's attention ask the store inside a `with` block; afterwards it is what it was before.

    Raises `UnsupportedModelError` for models whose attention cannot be exchanged.
    """
    check_supported(model)
    register()
    former = _implementations(model.config)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UnsupportedModelError(f"{type(model).__name__} did not take the attention function {NAME!r}")
        yield model
    finally:
        model.set_attn_implementation(former)


def _implementations(config: Any) -> str | dict[str, str]:
    """Return the attention implementation of a configuration, or of it ("") and each of those nested in it."""
    own: str = config._attn_implementation
    nested = (getattr(config, name, None) for name in config.sub_configs)
    found = {
        name: getattr(sub, "_attn_implementation", None) for name, sub in zip(config.sub_configs, nested, strict=True)
    }
    inner = {name: implementation for name, implementation in found.items() if implementation is not None}
    return {"": own, **inner} if inner else own
