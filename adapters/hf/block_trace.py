"""Recording which blocks a model's decoding reads, as a block trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch

from kvstore import StoreConfig
from kvstore.adapters.hf.attention import use_store_attention
from kvstore.adapters.hf.cache import StoreCache
from kvstore.adapters.hf.compat import cache_argument
from kvstore.budget import Budget
from kvstore.errors import InvalidQueryError, UnsupportedModelError
from kvstore.replay.recording import record_blocks
from kvstore.replay.trace import BlockTrace

Tell = Callable[[str, int, int], None]


def record_decoding(
    model: Any,
    ids: Sequence[int],
    n_steps: int,
    *,
    budget: Budget,
    block_tokens: int | None = None,
    config: StoreConfig | None = None,
    name: str = "",
    tell: Tell | None = None,
) -> BlockTrace:
    """Read all of ids but the last n_steps densely, then those one by one within the budget, and record the blocks.

    The tokens are those of the text, whatever the model would have written. block_tokens: rows of a block, the
    schema's if left out. name: of the model. Raises `InvalidQueryError` for steps out of range, and
    `UnsupportedModelError` when the store cannot serve the model.
    """
    if not 0 < n_steps < len(ids):
        raise InvalidQueryError(f"{n_steps} of {len(ids)} tokens cannot be decoded: give at least 1, and a prompt")
    tell = tell or (lambda *_: None)
    tokens = torch.tensor([list(ids)], device=model.device)
    with use_store_attention(model), closing(StoreCache(model, budget=None, config=config)) as cache:
        if cache.store is None:
            raise UnsupportedModelError("no layer of the model attends to all tokens; there are no blocks to record")
        tell("reading the prompt", 0, 0)
        _forward(model, tokens[:, :-n_steps], cache)
        cache.set_budget(budget)
        with record_blocks(cache.store, block_tokens=block_tokens) as recorder:
            for step in range(n_steps):
                tell("decoding", step, n_steps)
                at = len(ids) - n_steps + step
                _forward(model, tokens[:, at : at + 1], cache)
        return recorder.trace(name)


@torch.inference_mode()
def _forward(model: Any, tokens: torch.Tensor, cache: StoreCache) -> None:
    model(tokens, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
