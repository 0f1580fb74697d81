"""Running a model one token at a time with any cache, and timing it."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from kvstore.adapters.hf import cache_argument
from kvstore.adapters.model_files import end_tokens


class Decoder:
    """One sequence of a model; reads many tokens in one pass or one token a step.

    Attributes:
        read_s: seconds of the last `read`.
        step_s: seconds of each `step` since then.
    """

    def __init__(self, model: Any, cache: Any = None) -> None:
        """Use `cache`, or (None) the cache that the model makes by itself: transformers' DynamicCache."""
        self.cache = cache
        self.read_s = 0.0
        self.step_s: list[float] = []
        self._model = model
        self._argument = cache_argument(model)
        self._ends = end_tokens(model)

    def read(self, tokens: list[int]) -> None:
        """Run the model over tokens in one pass, all attended to."""
        started = perf_counter()
        self._forward(tokens)
        self.read_s, self.step_s = perf_counter() - started, []

    def step(self, token: int) -> int:
        """Run the model over one token; return the likeliest next one."""
        started = perf_counter()
        logits = self._forward([token])
        self.step_s.append(perf_counter() - started)
        return int(logits.argmax())

    def is_end(self, token: int) -> bool:
        """Whether the model ends its text with this token."""
        return token in self._ends

    def rewind(self, n_tokens: int) -> None:
        """Forget the newest n_tokens tokens."""
        self.cache.crop(-n_tokens)
        self.step_s = []

    @torch.inference_mode()
    def _forward(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits after the last token, float [n_vocabulary]."""
        out = self._model(
            torch.tensor([tokens], device=self._model.device),
            use_cache=True,
            logits_to_keep=1,
            **{self._argument: self.cache},
        )
        self.cache = getattr(out, self._argument)
        logits: torch.Tensor = out.logits[0, -1]
        return logits
