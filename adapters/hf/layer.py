"""One full attention layer of a model, as transformers' caches see it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvstore.adapters.hf.batch import Batch
from kvstore.adapters.hf.compat import NAME, hand_over, kept_rows
from kvstore.errors import UnsupportedModelError


class StoreLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose keys and values are the rows of one layer of a store.

    `update` returns all rows, as any cache does, until `store_attention` has received what it returned, unchanged
    and with a mask of the usual form. From then on it returns the new rows only: the attention function finds the
    layer on them and asks the store for the rest.

    What concerns the whole batch is done once, by the first of the layers that share it.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, index: int, n_layers: int) -> None:
        super().__init__()
        self.batch = batch
        self.index = index
        self.is_last = index == n_layers - 1
        self.is_initialized = True  # keys and values stay None
        self.attention_config: Any = None  # of the model whose attention asks the store
        self._returned_part = False  # whether the last update left out the rows before

    def __repr__(self) -> str:
        return f"StoreLayer({self.index})"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the store is there from the beginning."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys [batch, n_kv_heads, n, head_dim] and values [..., value_dim]; return what attention needs."""
        batch = self.batch
        attention_kwargs = kwargs.get("kwargs")
        if self.index == 0:
            batch.begin(key_states.shape[0], key_states.shape[2], attention_kwargs)
        batch.append(self.index, key_states, value_states)
        if self.is_last:
            batch.complete()
        config = self.attention_config
        self._returned_part = config is not None and config._attn_implementation == NAME
        if not self._returned_part:
            key_states, value_states = batch.whole(self.index, key_states, value_states)
        hand_over(self, key_states, value_states, attention_kwargs)
        return key_states, value_states

    def check_whole(self, module: Any) -> None:
        """Raise `UnsupportedModelError` unless the last update returned all rows."""
        if self._returned_part and self.batch.n_before:
            raise UnsupportedModelError(
                f"{type(module).__name__} changed keys or values on their way from the cache to attention, which it "
                "had not done before; use another cache for this model"
            )

    def copy_to(self, batch: Batch) -> StoreLayer:
        """Return the same layer of another batch."""
        twin = StoreLayer(batch, self.index, self.batch.store.schema.n_layers)
        twin.attention_config = self.attention_config
        return twin

    def get_seq_length(self) -> int:
        """Rows that the layer holds, whatever the budget selects of them."""
        return len(self.batch)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove -tokens_to_remove rows, or (positive) keep that many."""
        if self.index == 0:
            self.batch.truncate(kept_rows(len(self.batch), int(tokens_to_remove)))

    def reset(self) -> None:
        """Forget all rows."""
        if self.index == 0:
            self.batch.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make batch row i what batch row beam_idx[i] is."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        if self.index == 0:
            n_batch = len(self.batch.sequences)
            self.batch.select([row for row in range(n_batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows with these numbers (or those where a bool mask is True)."""
        if self.index == 0:
            rows = torch.arange(len(self.batch.sequences), device=indices.device)[indices]
            self.batch.select(rows.tolist())

    def offload(self) -> None:
        """Nothing to do: the rows are in host memory."""

    def prefetch(self) -> None:
        """Nothing to do: the attention function fetches what it needs."""
