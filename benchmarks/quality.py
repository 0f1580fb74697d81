"""What selection costs in quality: a real text's next tokens, predicted with selective and with full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engines import DYNAMIC, Engine, StoreEngine
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig

DEFAULT, EXACT, RANDOM = "default index", "exact selection", "random rows"


@dataclass(frozen=True)
class Scores:
    """Selective against full attention, means over tokens.

    Attributes:
        kl: KL(full || selective) of the next token's distribution, nats.
        agreement: share of tokens where both find the same token the most likely one.
        delta_nll: negative log likelihood of the text's token, selective minus full, nats.
    """

    kl: float
    agreement: float
    delta_nll: float


@dataclass(frozen=True)
class Place:
    """One place of a text.

    Attributes:
        ids: int64 [>= n_context + n_tokens + 1].
        n_context: tokens read densely.
        n_tokens: tokens after them, fed one at a time.
    """

    ids: torch.Tensor
    n_context: int
    n_tokens: int


def index_configs() -> dict[str, StoreConfig]:
    """Settings of the stores that are compared, by name; the budget is set later."""
    from benchmarks.control import KIND, register_control
    from kvstore import IndexConfig, StoreConfig

    register_control()
    return {
        DEFAULT: StoreConfig(),
        EXACT: StoreConfig(index=IndexConfig(kind="flat")),
        RANDOM: StoreConfig(index=IndexConfig(kind=KIND, over_fetch=1.0)),
    }


def measure_quality(
    model: Any, places: Sequence[Place], budgets: Sequence[float], configs: dict[str, StoreConfig], tell: Tell
) -> dict[tuple[float, str], Scores]:
    """Return the mean scores over all places, by budget and name of the store's settings."""
    found: dict[tuple[float, str], list[Scores]] = {}
    for number, place in enumerate(places):
        where = f"place {number + 1} of {len(places)}"
        tell(f"{where}: full attention")
        full = _full_attention(model, place)
        for name, config in configs.items():
            engine = StoreEngine(model, config)
            tell(f"{where}: {name}, {place.n_context} tokens of context")
            engine.start(place.n_context + place.n_tokens)
            with engine.active():
                engine.forward(place.ids[: place.n_context])
                for budget in budgets:
                    tell(f"{where}: {name}, budget {budget:g}, {place.n_tokens} tokens")
                    found.setdefault((budget, name), []).append(_selective(engine, place, budget, full))
            engine.close()
    return {key: _mean(scores) for key, scores in found.items()}


def _full_attention(model: Any, place: Place) -> torch.Tensor:
    """Log probabilities, float32 [n_tokens, vocabulary], of the token after each of the fed ones."""
    engine = Engine(DYNAMIC, model)
    stop = place.n_context + place.n_tokens
    engine.start(stop)
    logits = engine.forward(place.ids[:stop], keep=place.n_tokens)
    engine.close()
    return logits.float().log_softmax(-1)


def _selective(engine: StoreEngine, place: Place, budget: float, full: torch.Tensor) -> Scores:
    engine.set_budget(budget)
    kl = agreed = delta = 0.0
    for i in range(place.n_tokens):
        at = place.n_context + i
        got = engine.forward(place.ids[at : at + 1])[-1].float().log_softmax(-1)
        wanted = full[i]
        kl += float((wanted.double().exp() * (wanted.double() - got.double())).sum())
        agreed += float(got.argmax() == wanted.argmax())
        following = place.ids[at + 1]
        delta += float(wanted[following] - got[following])
    engine.back(place.n_tokens)
    return Scores(kl / place.n_tokens, agreed / place.n_tokens, delta / place.n_tokens)


def _mean(scores: Sequence[Scores]) -> Scores:
    n = len(scores)
    return Scores(
        sum(s.kl for s in scores) / n, sum(s.agreement for s in scores) / n, sum(s.delta_nll for s in scores) / n
    )
