"""Dense attention as transformers computes it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvstore.errors import UnsupportedModelError

_EAGER_ONLY = ("softcap", "s_aux")  # score capping and attention sinks: not in PyTorch's fused attention
_BEYOND_STORE = (*_EAGER_ONLY, "position_bias", "sliding_window")


def only_dense(kwargs: dict[str, Any]) -> bool:
    """Whether an attention call asks for more than a softmax over scaled inner products of all rows."""
    return any(kwargs.get(name) is not None for name in _BEYOND_STORE)


def dense_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to all of key [batch, n_kv_heads, n, head_dim] and value [..., value_dim]; queries are the last rows.

    query [batch, n_q_heads, n_queries, head_dim] -> [batch, n_queries, n_q_heads, value_dim], bit for bit
    what transformers' "sdpa" gives, or the model's own "eager" where that cannot compute it.
    """
    attend: Any = sdpa_attention_forward
    if any(kwargs.get(name) is not None for name in _EAGER_ONLY):
        attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if attend is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no eager attention to fall back on")
        attention_mask = _added_mask(attention_mask, query, key)
    result: tuple[torch.Tensor, torch.Tensor | None] = attend(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


def _added_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Turn a bool mask, or None for a causal one, into the float mask that is added to scores."""
    if mask is None:
        n_queries, n_rows = query.shape[2], key.shape[2]
        mask = torch.ones(n_queries, n_rows, dtype=torch.bool, device=query.device).tril(n_rows - n_queries)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )
