"""A dense cache that neither copies nor masks: rows are written into room made once and attention gets views.

transformers has none like it: its `DynamicCache` copies all rows at every token, and its `StaticCache` attends
to the whole room under a mask. This is the strongest dense peer that its interface allows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class ViewsLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in room for `capacity` tokens; `keys` and `values` are views of the rows in use."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the room, float [batch, n_kv_heads, capacity, dim] each."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._room = tuple(x.new_empty(*x.shape[:2], self._capacity, x.shape[3]) for x in (key_states, value_states))
        self.keys, self.values = (room[:, :, :0] for room in self._room)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows behind those in use; return views of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        keys, values = self._room
        keys[:, :, start:stop], values[:, :, start:stop] = key_states, value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values


def views_cache(config: Any, capacity: int) -> DynamicCache:
    """Return an empty cache with room for `capacity` tokens; every layer must be one of full attention."""
    cache = DynamicCache(config=config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise ValueError("preallocated views serve models whose layers all have full attention")
    cache.layers = [ViewsLayer(capacity) for _ in cache.layers]
    return cache
