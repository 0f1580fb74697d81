"""Speed of prompts and of decoded tokens at one length, after a check that dense results are equal.

Beyond the context that a model was trained for there is no prompt: caches are filled, and tokens tell their cost only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engines import DENSE_PEERS, DYNAMIC, Engine, StoreEngine, make_engine
from benchmarks.filling import Passage, fill
from benchmarks.split import Meter, Split
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
        first_token_s: seconds for the prompt and one token after it, by engine; empty where caches were filled.
        tokens_per_s: of decoding, by engine for the peers and by budget for the store.
        logit_difference: largest difference of logits to those of `DynamicCache`, by engine (the store's with
            a full budget).
        splits: where a step's time goes in the store, by budget, from blocks of their own.
    """

    first_token_s: dict[str, float]
    tokens_per_s: dict[str | float | None, float]
    logit_difference: dict[str, float]
    splits: dict[float | None, Split]

    @property
    def cost_only(self) -> bool:
        """Whether caches were filled, so that tokens have a cost and no meaning."""
        return not self.first_token_s


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

    def read(engines: Sequence[Engine]) -> dict[str, float]:
        """Let every engine read the prompt; return the seconds to the first token."""
        return _time_first_token(engines, ids[:n_prompt], needed, effort.prompts, tell)

    return _measure(model, read, ids[n_prompt:], budgets, effort, tell, config)


def measure_cost(
    model: Any,
    passage: Passage,
    n_rows: int,
    budgets: Sequence[float | None],
    effort: Effort,
    tell: Tell,
    config: StoreConfig | None = None,
) -> Speed:
    """Time decoding in all engines with n_rows of a passage's keys and values; `first_token_s` is empty.

    Raises `WrongResultError` before timing.
    """

    def fill_all(engines: Sequence[Engine]) -> dict[str, float]:
        """Fill the engines' caches; return no times."""
        for engine in engines:
            tell(f"filling {engine.name}")
            fill(engine, passage, n_rows, n_rows + effort.tokens_after)
        return {}

    return _measure(model, fill_all, passage.after, budgets, effort, tell, config)


def _measure(
    model: Any,
    begin: Callable[[Sequence[Engine]], dict[str, float]],
    after: torch.Tensor,
    budgets: Sequence[float | None],
    effort: Effort,
    tell: Tell,
    config: StoreConfig | None,
) -> Speed:
    """Let `begin` put rows into all engines, compare them, then time decoding of after, int64 [>= block_tokens + 1]."""
    engines = [make_engine(name, model) for name in DENSE_PEERS]
    store = StoreEngine(model, config)
    try:
        first = begin([*engines, store])
        tell("comparing logits")
        difference = _check_equal([*engines, store], after[0], effort.check_tokens)
        rates, splits = _time_decode(engines, store, after, budgets, effort, tell)
    finally:
        for engine in (*engines, store):
            engine.close()
    return Speed(first, rates, difference, splits)


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
) -> tuple[dict[str | float | None, float], dict[float | None, Split]]:
    """Return tokens a second by engine and budget, and the splits by budget; ids int64 [>= block_tokens]."""
    tokens = [ids[i : i + 1] for i in range(effort.block_tokens)]
    contenders = [Contender(engine.name, _block(engine, tokens), _cut_back(engine, tokens)) for engine in engines]
    names: dict[str, str | float | None] = {engine.name: engine.name for engine in engines}
    meters = {budget: Meter(store, tokens) for budget in budgets}
    apart = []
    for budget, meter in meters.items():
        name, scope = budget_name(budget), _cut_back(store, tokens, (budget,))
        contenders.append(Contender(name, _block(store, tokens), scope))
        names[name] = budget
        apart.append(Contender(f"{name}, taken apart", meter.run, _metered(meter, scope)))
    seconds = medians(interleave([*contenders, *apart], effort.blocks, lambda line: tell(f"decode, {line}")))
    rates = {key: len(tokens) / seconds[name] for name, key in names.items()}
    return rates, {budget: meter.median() for budget, meter in meters.items()}


def _metered(meter: Meter, scope: Callable[[], Any]) -> Callable[[], Any]:
    """Return scope with the recording of a meter inside."""

    @contextmanager
    def metered() -> Iterator[None]:
        """The context of one block."""
        with scope(), meter.recording():
            yield

    return metered


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
