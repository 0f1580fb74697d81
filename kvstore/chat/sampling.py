"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstore.errors import ConfigError

SEED_STEP = 1_000_003
"""Between the seeds of two turns; a prime, so that seeds near each other do not meet soon."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: of the softmax; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together have this probability are drawn from.
        seed: the same seed gives the same answers to the same conversation, also after a restart; None: others.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (the likeliest token) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be at least 0 and below 2 ** 32, not {self.seed}")


class Sampler:
    """Chooses the tokens of one turn; `turn` is its number, which goes into the seed."""

    def __init__(self, settings: Sampling, turn: int) -> None:
        self._settings = settings
        self._generator = torch.Generator()
        if settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(settings.seed + SEED_STEP * turn)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return a token for logits, float [n_vocabulary], any device."""
        if not self._settings.temperature:
            return int(logits.argmax())
        scores = logits.detach().double().cpu() / self._settings.temperature
        probabilities, tokens = scores.softmax(-1).sort(descending=True, stable=True)
        before = probabilities.cumsum(-1) - probabilities  # what likelier tokens have; the first token always stays
        drawn = torch.multinomial(probabilities.where(before < self._settings.top_p, 0.0), 1, generator=self._generator)
        return int(tokens[drawn])
