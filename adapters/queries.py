"""Seeing the queries of a decode step, which pass through attention and are kept nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from kvstore.adapters.hf import StoreCache, register, store_attention
from kvstore.adapters.hf.compat import NAME


@contextmanager
def recorded_queries(cache: StoreCache) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the queries of forward passes with one token, inside `use_store_attention`.

    Yields a dictionary, layer of the store -> queries [n_q_heads, head_dim] of the newest pass, batch row 0.
    For `Sequence.explain` and measurements; every model in the process pays a copy of its queries meanwhile.
    """
    queries: dict[int, torch.Tensor] = {}

    def record(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = cache.store_layers.get(getattr(module, "layer_idx", -1))
        if layer is not None and query.shape[2] == 1:
            queries[layer] = query[0, :, 0].detach().cpu().clone()
        return store_attention(module, query, *args, **kwargs)

    AttentionInterface.register(NAME, record)
    try:
        yield queries
    finally:
        register()
