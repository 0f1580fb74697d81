"""What building indexes beside the forward pass does to the time of a prompt, and to the first token after it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.engines import StoreEngine
from benchmarks.report import Metric, Report
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig

PROMPT = Metric("prompt", "s", "lower")
FIRST = Metric("prompt and one token", "s", "lower")
BUILDS = Metric("builds, some thread busy with one", "s", "neither")
HIDDEN = Metric("of it beside the forward pass", "s", "neither")
WAITED = Metric("waited for indexes", "s", "neither")
LOGITS = Metric("largest difference of a logit", "logits", "neither")
COMMIT = "built at the commit"
BUDGET = 0.1


@dataclass(frozen=True)
class Options:
    """Tokens of the prompts, how often each is read in each way, and the worker threads to try."""

    lengths: tuple[int, ...] = (4032,)
    rounds: int = 3
    threads: tuple[int, ...] = (1, 2)


QUICK = Options(lengths=(1024,), rounds=1)


@dataclass(frozen=True)
class Run:
    """One prompt and the token after it: seconds, and the token's logits."""

    prompt_s: float
    first_s: float
    builds_s: float
    hidden_s: float
    waited_s: float
    logits: torch.Tensor


def ways(threads: Sequence[int]) -> dict[str, StoreConfig]:
    """Return the settings that are compared, by name."""
    from kvstore import IndexConfig, StoreConfig

    overlap = {f"overlap, {n} thread{'s' * (n > 1)}": IndexConfig(build="overlap", threads=n) for n in threads}
    return {name: StoreConfig(index=index) for name, index in {COMMIT: IndexConfig(), **overlap}.items()}


def read_prompt(model: Any, config: StoreConfig, ids: torch.Tensor) -> Run:
    """Read all of ids but the last as a prompt, then the last as the first token."""
    engine = StoreEngine(model, config)
    engine.start(len(ids))
    engine.set_budget(BUDGET)
    try:
        with engine.active(), engine.cache.store.timeline() as timeline:
            started = time.perf_counter()
            engine.forward(ids[:-1])
            prompt_s = time.perf_counter() - started
            logits = engine.forward(ids[-1:])[-1]
            first_s = time.perf_counter() - started
        hidden_s = timeline.overlap("build", "step")
        return Run(prompt_s, first_s, timeline.seconds("build"), hidden_s, timeline.seconds("wait"), logits)
    finally:
        engine.close()


def run_prefill(model: Any, ids: torch.Tensor, options: Options, report: Report, tell: Tell) -> None:
    """Measure every length, the ways in turn, and add medians to the report."""
    configs = ways(options.threads)
    tell("warming up")
    for config in configs.values():
        read_prompt(model, config, ids[:1025])
    for length in options.lengths:
        found: dict[str, list[Run]] = {name: [] for name in configs}
        for round_ in range(options.rounds):
            names = list(configs)[round_ % len(configs) :] + list(configs)[: round_ % len(configs)]
            for name in names:
                tell(f"{length} tokens, {name}, {round_ + 1} of {options.rounds}")
                found[name].append(read_prompt(model, configs[name], ids[: length + 1]))
        _add(report, length, found)


def _add(report: Report, length: int, found: dict[str, list[Run]]) -> None:
    def median(name: str, field: str) -> float:
        return statistics.median(getattr(run, field) for run in found[name])

    fields = {PROMPT: "prompt_s", FIRST: "first_s", BUILDS: "builds_s", HIDDEN: "hidden_s", WAITED: "waited_s"}
    for name in found:
        if name == COMMIT:
            continue
        case = f"{length} tokens, {name}"
        for metric, field in fields.items():
            report.add(case, metric, median(name, field), COMMIT, median(COMMIT, field))
        difference = max(float((run.logits - found[COMMIT][0].logits).abs().max()) for run in found[name])
        report.add(case, LOGITS, difference, COMMIT, 0.0)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short prompt, once.")] = False,
    length: Annotated[int | None, typer.Option(min=512, help="Tokens of the prompt.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Prompts of each way.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch (its choice).")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
) -> None:
    """Time prompts and the first token after them, with indexes built at the commit and beside the forward pass."""
    import torch
    from rich.console import Console

    from benchmarks import inputs
    from benchmarks.machine import describe_machine
    from benchmarks.progress import Progress
    from kvstore.adapters.model_files import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    base = QUICK if quick else Options()
    options = replace(base, lengths=(length,) if length else base.lengths, rounds=rounds or base.rounds)
    report = Report("prefill", describe_machine())
    with Progress() as tell:
        loaded = load_model(model, report=tell)
        ids = inputs.tokens_of(inputs.read_text(text), loaded.tokenizer)
        run_prefill(loaded.model, ids, options, report, tell)
    Console(width=120).print(report.table())
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    app()
