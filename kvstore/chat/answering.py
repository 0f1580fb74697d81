"""Running a model token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvstore.adapters.hf import StoreCache, cache_argument


def answer_tokens(
    model: Any, cache: StoreCache, tokens: list[int], choose: Callable[[torch.Tensor], int]
) -> Iterator[int]:
    """Read tokens (all at once, at least one) into the cache, then yield one chosen token after the other, for ever.

    A token is read into the cache when the next one is asked for: the last one yielded has no row.
    """
    argument = cache_argument(model)
    unread = tokens
    while True:
        token = choose(_forward(model, argument, cache, unread))
        yield token
        unread = [token]


@torch.inference_mode()
def _forward(model: Any, argument: str, cache: StoreCache, tokens: list[int]) -> torch.Tensor:
    """Return the logits after the last token, float [n_vocabulary]."""
    ids = torch.tensor([tokens], device=model.device)
    logits: torch.Tensor = model(ids, use_cache=True, logits_to_keep=1, **{argument: cache}).logits
    return logits[0, -1]
