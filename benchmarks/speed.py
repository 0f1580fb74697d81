"""Speed of prompts and of decoded tokens at one length, after a check that dense results are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engines import DENSE_PEERS, DYNAMIC, Engine, StoreEngine, make_engine
from benchmarks.timing import Contender, Tell, interleave, medians

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig

MAX_LOGIT_DIFFERENCE = 1e-3


class WrongResultError(AssertionError):
    """Raised when what is about to be timed does not compute what it should."""


@dataclass(frozen=True)
class Speed:
    """Medians at one length.

    Attributes:
        first_token_s: seconds for the prompt and one token after it, by engine.
        tokens_per_s: of decoding, by engine for the peers and by budget for the store.
        logit_difference: largest difference of logits to those of `DynamicCache`, by engine (the store's with
            a full budget).
    """

    first_token_s: dict[str, float]
    tokens_per_s: dict[str | float | None, float]
    logit_difference: dict[str, float]


@dataclass(frozen=True)
class Effort:
    """How much to run.

    Attributes:
        prompts: how often each engine reads the prompt.
        blocks: how many blocks of tokens each engine decodes.
        block_tokens: tokens of a block. The store encodes the rows that leave the window 32 at a time: a
            multiple of that charges every block its share.
        check_tokens: tokens whose logits are compared.
    """

    prompts: int = 3
    blocks: int = 5
    block_tokens: int = 32
    check_tokens: int = 8

    @property
    def tokens_after(self) -> int:
        """Tokens of text needed after a prompt."""
        return max(self.block_tokens, self.check_tokens) + 1


def measure_speed(
    model: Any,
    ids: torch.Tensor,
    n_prompt: int,
    budgets: Sequence[float | None],
    effort: Effort,
    tell: Tell,
    config: StoreConfig | None = None,
) -> Speed:
    """Time all engines on ids, int64 [>= n_prompt + block_tokens + 1]; raises `WrongResultError` before timing.

    Prompts and blocks of all engines take turns. Every block decodes the same tokens of the text from the
    same length on: each cache is cut back after its block.
    """
    needed = n_prompt + effort.tokens_after
    if len(ids) < needed:
        raise ValueError(f"{n_prompt} tokens of prompt need a text of {needed} tokens, this one has {len(ids)}")
    engines = [make_engine(name, model) for name in DENSE_PEERS]
    store = StoreEngine(model, config)
    try:
        first = _time_first_token([*engines, store], ids[:n_prompt], needed, effort.prompts, tell)
        tell("comparing logits")
        difference = _check_equal([*engines, store], ids[n_prompt], effort.check_tokens)
        rates = _time_decode(engines, store, ids[n_prompt:], budgets, effort, tell)
    finally:
        for engine in (*engines, store):
            engine.close()
    return Speed(first, rates, difference)


def warm_up(model: Any, ids: torch.Tensor, budgets: Sequence[float | None], config: StoreConfig | None = None) -> None:
    """Let everything compile and start that would otherwise be timed once; ids are a prompt long enough to select."""
    for engine in (*(make_engine(name, model) for name in DENSE_PEERS), StoreEngine(model, config)):
        engine.start(len(ids) + len(budgets))
        with engine.active():
            engine.forward(ids)
            for budget in budgets:
                if isinstance(engine, StoreEngine):
                    engine.set_budget(budget)
                engine.forward(ids[:1])
        engine.close()


def _time_first_token(
    engines: Sequence[Engine], prompt: torch.Tensor, capacity: int, rounds: int, tell: Tell
) -> dict[str, float]:
    contenders = [Contender(engine.name, _first_token(engine, prompt), _fresh(engine, capacity)) for engine in engines]
    return medians(interleave(contenders, rounds, lambda line: tell(f"prompt, {line}")))


def _first_token(engine: Engine, prompt: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        token = engine.forward(prompt)[-1].argmax()
        engine.forward(token[None])  # an index that is built behind the prompt is waited for here

    return run


def _fresh(engine: Engine, capacity: int) -> Callable[[], Any]:
    @contextmanager
    def scope() -> Iterator[None]:
        engine.start(capacity)
        with engine.active():
            yield
        engine.back(1)

    return scope


def _check_equal(engines: Sequence[Engine], token: torch.Tensor, n_tokens: int) -> dict[str, float]:
    """Decode greedily with `DynamicCache`, the same tokens with the others; leave every cache as it was."""
    import torch

    reference = next(engine for engine in engines if engine.name == DYNAMIC)
    tokens, wanted = [token], []
    for _ in range(n_tokens):
        wanted.append(reference.forward(tokens[-1][None])[-1])
        tokens.append(wanted[-1].argmax())
    reference.back(n_tokens)
    expected = torch.stack(wanted)
    worst = {}
    for engine in engines:
        got = torch.stack(_replay(engine, tokens[:n_tokens]))
        engine.back(n_tokens)
        again = torch.stack(_replay(engine, tokens[:1]))
        engine.back(1)
        difference = max(float((got - expected).abs().max()), float((again - expected[:1]).abs().max()))
        if not difference <= MAX_LOGIT_DIFFERENCE or not torch.equal(got.argmax(-1), expected.argmax(-1)):
            raise WrongResultError(f"{engine.name}: logits differ from those of {DYNAMIC} by {difference:.2g}")
        worst[engine.name] = difference
    return worst


def _replay(engine: Engine, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(engine, StoreEngine):
        engine.set_budget(None)
    with engine.active():
        return [engine.forward(token[None])[-1] for token in tokens]


def _time_decode(
    engines: Sequence[Engine],
    store: StoreEngine,
    ids: torch.Tensor,
    budgets: Sequence[float | None],
    effort: Effort,
    tell: Tell,
) -> dict[str | float | None, float]:
    tokens = [ids[i : i + 1] for i in range(effort.block_tokens)]
    contenders = [Contender(engine.name, _block(engine, tokens), _cut_back(engine, tokens)) for engine in engines]
    names: dict[str, str | float | None] = {engine.name: engine.name for engine in engines}
    for budget in budgets:
        name = budget_name(budget)
        contenders.append(Contender(name, _block(store, tokens), _cut_back(store, tokens, (budget,))))
        names[name] = budget
    seconds = medians(interleave(contenders, effort.blocks, lambda line: tell(f"decode, {line}")))
    return {names[name]: len(tokens) / figure for name, figure in seconds.items()}


def _block(engine: Engine, tokens: Sequence[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for token in tokens:
            engine.forward(token)

    return run


def _cut_back(
    engine: Engine, tokens: Sequence[torch.Tensor], budget: tuple[float | None] | None = None
) -> Callable[[], Any]:
    @contextmanager
    def scope() -> Iterator[None]:
        if budget is not None and isinstance(engine, StoreEngine):
            engine.set_budget(budget[0])
        with engine.active():
            yield
        engine.back(len(tokens))

    return scope


def budget_name(budget: float | None) -> str:
    """Return what tables call a budget.

    >>> budget_name(0.1), budget_name(None)
    ('store, 1/10', 'store, full budget')
    """
    if budget is None:
        return "store, full budget"
    from fractions import Fraction

    return f"store, {Fraction(budget).limit_denominator(1000)}"
