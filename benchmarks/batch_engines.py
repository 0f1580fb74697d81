"""Several prompts of different lengths, padded at the left, and a model that reads them into one kind of cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engines import DYNAMIC, STORE

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig
    from kvstore.budget import Budget

SHORTEST = 0.75
"""Length of the shortest prompt, as a share of the longest."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to read, int64 [n], and those of the text after them."""

    ids: torch.Tensor
    after: torch.Tensor


def make_prompts(ids: torch.Tensor, n_tokens: int, n_after: int, count: int) -> list[Prompt]:
    """Return prompts from places spread over ids; the first has n_tokens, the others fewer, down to three quarters."""
    from benchmarks.inputs import places

    prompts = []
    for number, stretch in enumerate(places(ids, n_tokens + n_after, count)):
        left_out = round(number * n_tokens * (1 - SHORTEST) / max(1, count - 1))
        prompts.append(Prompt(stretch[left_out:n_tokens], stretch[n_tokens:]))
    return prompts


def padded(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, int64 [n_batch, longest] each, padded at the left with token 0."""
    import torch

    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.ids) :] = prompt.ids
        mask[row, longest - len(prompt.ids) :] = 1
    return ids, mask


class BatchEngine:
    """A model and one cache of a batch; `name` says which: transformers' `DynamicCache` or the store."""

    def __init__(self, name: str, model: Any, config: StoreConfig | None = None) -> None:
        from transformers import DynamicCache

        from kvstore.adapters.hf import StoreCache, cache_argument

        if name not in (DYNAMIC, STORE):
            raise ValueError(f"no engine is named {name!r}; there are {DYNAMIC} and {STORE}")
        self.name, self.model = name, model
        self.cache: Any
        if name == STORE:
            self.cache = StoreCache(model, budget=None, config=config)
        else:
            self.cache = DynamicCache(config=model.config)
        self._argument = cache_argument(model)
        self._mask: torch.Tensor | None = None

    def prompt(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Read the prompts; return the logits of what follows each, [n_batch, vocabulary]."""
        ids, self._mask = padded(prompts)
        return self._forward(ids, (self._mask.cumsum(1) - 1).clamp(min=0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one token a sequence, int64 [n_batch]; return the logits of what follows."""
        assert self._mask is not None
        self._mask = _widened(self._mask)
        return self._forward(tokens[:, None], self._mask.sum(1, keepdim=True) - 1)

    def greedy(self, logits: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Decode from these logits on; return the tokens, int64 [n_batch, n_tokens], and step back."""
        import torch

        tokens = []
        with self.active():
            for _ in range(n_tokens):
                tokens.append(logits.argmax(-1))
                logits = self.forward(tokens[-1])
        self.back(n_tokens)
        return torch.stack(tokens, 1)

    def back(self, n_tokens: int) -> None:
        """Forget the newest tokens."""
        from kvstore.adapters.hf.compat import crop_argument

        assert self._mask is not None
        length = int(self.cache.get_seq_length())
        if n_tokens:
            self.cache.crop(-n_tokens if self.name == STORE else crop_argument(length, length - n_tokens))
            self._mask = self._mask[:, :-n_tokens]
        if not int(self.cache.get_seq_length()) == length - n_tokens == self._mask.shape[1]:
            raise RuntimeError(f"{self.name}: stepping back {n_tokens} of {length} tokens had no effect")

    def set_budget(self, budget: Budget) -> None:
        """Set the rows that each decoded token attends to, where the cache is the store; None for all."""
        if self.name == STORE:
            self.cache.set_budget(budget)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which `prompt` and `forward` are called."""
        from kvstore.adapters.hf import use_store_attention

        with use_store_attention(self.model) if self.name == STORE else nullcontext():
            yield

    def close(self) -> None:
        """Give the cache's memory back."""
        if self.cache is not None and self.name == STORE:
            self.cache.close()
        self.cache = None

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        import torch

        cache = {self._argument: self.cache}
        with torch.no_grad():
            out = self.model(
                ids, attention_mask=self._mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def _widened(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask, int64 [n_batch, n], with one row more that is seen."""
    import torch

    return torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
