"""How fast does a batch of sequences decode with the store, beside `DynamicCache` and the same padded prompts?

Prompts of different lengths, padded at the left, as `generate` would. Before anything is timed each sequence's tokens
are compared with those of a run by itself; see `batch_checks` for what can be equal and what cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import inputs
from benchmarks.batch_checks import Alone, Checked, check_batch, run_alone
from benchmarks.batch_engines import BatchEngine, Prompt, make_prompts
from benchmarks.engines import DYNAMIC, STORE
from benchmarks.report import Metric, Report
from benchmarks.setup import reported
from benchmarks.speed import budget_name
from benchmarks.timing import Contender, Tell, interleave, medians

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig

DECODE = Metric("decode", "tokens/s", "higher")
SCALING = Metric("decode, beside a batch of one", "tokens/s", "higher")
PROMPT = Metric("prompts, read once", "s", "lower")
DIFFERENCE = Metric("largest logit difference", "logits", "neither")
SAME = Metric("sequences with the tokens of their single run", "share", "neither")
SAME_TOKENS = Metric("tokens equal to those of single runs", "share", "neither")
BITS = Metric("attention results equal to those alone, bit for bit", "results", "neither")
ALONE, ONE = "single runs", "batch of one"


@dataclass(frozen=True)
class Options:
    """Sequences of a batch, ascending; tokens of the longest prompt; the budget; blocks of tokens each engine decodes;
    tokens that are compared. Rows that leave the window are encoded 32 at a time: a block of 32 holds its share."""

    sizes: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 1024
    budget: float = 0.2
    blocks: int = 3
    block_tokens: int = 32
    check_tokens: int = 8


QUICK = Options(sizes=(1, 4), prompt_tokens=640, blocks=2, block_tokens=8, check_tokens=4)


def run_batch(
    model: Any, ids: torch.Tensor, options: Options, report: Report, tell: Tell, config: StoreConfig | None = None
) -> None:
    """Measure batches of prompts from ids, int64 [n], and add the rows; raises `WrongResultError` before timing."""
    prompts = make_prompts(ids, options.prompt_tokens, options.block_tokens, max(options.sizes))
    alone = run_alone(model, prompts, options.budget, options.check_tokens, config, tell)
    of_one: dict[str, float] = {}
    for size in options.sizes:
        rates = _measure(model, prompts[:size], alone[:size], options, report, _told(tell, size), config)
        if size == 1:
            of_one = rates
        for name in of_one:
            if size > 1 and name != DYNAMIC:
                report.add(_case(size, options, name), SCALING, rates[name], ONE, of_one[name])
        if of_one and size > 1:
            report.add(_case(size, options, DYNAMIC), SCALING, rates[DYNAMIC], ONE, of_one[DYNAMIC])


def _told(tell: Tell, size: int) -> Tell:
    return lambda line: tell(f"{size} sequences, {line}")


def _case(size: int, options: Options, name: str) -> str:
    return f"{size} sequence{'s' if size > 1 else ''} of up to {options.prompt_tokens} tokens, {name}"


def _measure(
    model: Any,
    prompts: Sequence[Prompt],
    alone: Sequence[Alone],
    options: Options,
    report: Report,
    tell: Tell,
    config: StoreConfig | None,
) -> dict[str, float]:
    """Add the rows of one batch; return tokens a second of all its sequences by engine."""
    peer, store = BatchEngine(DYNAMIC, model), BatchEngine(STORE, model, config)
    try:
        logits: dict[str, torch.Tensor] = {}
        contenders = [Contender(one.name, _read(one, prompts, logits), one.active) for one in (peer, store)]
        seconds = medians(interleave(contenders, 1, lambda line: tell(f"prompts, {line}")))
        tell("comparing")
        checked = check_batch(peer, store, (logits[DYNAMIC], logits[STORE]), alone, options.budget)
        rates = _time(peer, store, prompts, options, tell)
    finally:
        peer.close()
        store.close()
    _add(report, len(prompts), options, rates, seconds, checked)
    return rates


def _read(engine: BatchEngine, prompts: Sequence[Prompt], logits: dict[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        logits[engine.name] = engine.prompt(prompts)

    return run


def _time(
    peer: BatchEngine, store: BatchEngine, prompts: Sequence[Prompt], options: Options, tell: Tell
) -> dict[str, float]:
    """Decode the texts' own tokens, block by block in turn, each from the same length on."""
    import torch

    tokens = list(torch.stack([prompt.after[: options.block_tokens] for prompt in prompts], 1))
    contenders = [Contender(DYNAMIC, _block(peer, tokens), _cut_back(peer, len(tokens), None))]
    for budget in (None, options.budget):
        contenders.append(Contender(budget_name(budget), _block(store, tokens), _cut_back(store, len(tokens), budget)))
    seconds = medians(interleave(contenders, options.blocks, lambda line: tell(f"decode, {line}")))
    return {name: len(prompts) * len(tokens) / figure for name, figure in seconds.items()}


def _block(engine: BatchEngine, tokens: Sequence[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for token in tokens:
            engine.forward(token)

    return run


def _cut_back(engine: BatchEngine, n_tokens: int, budget: float | None) -> Callable[[], Any]:
    @contextmanager
    def scope() -> Iterator[None]:
        engine.set_budget(budget)
        with engine.active():
            yield
        engine.back(n_tokens)

    return scope


def _add(
    report: Report,
    size: int,
    options: Options,
    rates: dict[str, float],
    prompt_s: dict[str, float],
    checked: Checked,
) -> None:
    full, selective = budget_name(None), budget_name(options.budget)
    case = _case(size, options, full)
    report.add(case, DIFFERENCE, checked.logit_difference, DYNAMIC, 0.0)
    report.add(case, SAME, checked.same_tokens, ALONE, 1.0)
    report.add(case, PROMPT, prompt_s[STORE], DYNAMIC, prompt_s[DYNAMIC])
    report.add(case, DECODE, rates[full], DYNAMIC, rates[DYNAMIC])
    case = _case(size, options, selective)
    report.add(case, BITS, float(checked.results), "results compared", float(checked.results))
    report.add(case, SAME_TOKENS, checked.same_with_budget, ALONE, 1.0)
    report.add(case, DECODE, rates[selective], DYNAMIC, rates[DYNAMIC])
    report.add(case, DECODE, rates[selective], full, rates[full])


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One and four shorter sequences, few tokens: a minute.")
    ] = False,
    sizes: Annotated[str | None, typer.Option(help="Sequences of a batch, separated by commas.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=8, help="Tokens of the longest prompt.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of tokens each engine decodes.")] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a block.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
) -> None:
    """Tokens a second of batches with the store beside DynamicCache, each sequence compared with its single run."""
    from benchmarks.decode import _lengths

    base = QUICK if quick else Options()
    options = replace(
        base,
        sizes=base.sizes if sizes is None else _lengths(sizes),
        prompt_tokens=prompt_tokens or base.prompt_tokens,
        blocks=blocks or base.blocks,
        block_tokens=block_tokens or base.block_tokens,
    )
    from benchmarks.machine import describe_machine
    from kvstore.adapters.model_files import load_model

    report = Report("batch", describe_machine())
    with reported(report, json) as tell:
        loaded = load_model(model, report=tell)
        ids = inputs.tokens_of(inputs.read_text(text), loaded.tokenizer)
        run_batch(loaded.model, ids, options, report, tell)


if __name__ == "__main__":
    app()
