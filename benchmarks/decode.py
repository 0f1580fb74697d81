"""Is decoding with selection faster than dense decoding, and what does it cost in memory and in quality?"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import decode_rows, inputs
from benchmarks.engines import DENSE_PEERS, STORE
from benchmarks.filling import Passage, read_passage
from benchmarks.memory import Probe, Usage, measure_memory
from benchmarks.quality import DEFAULT, Place, index_configs, measure_quality
from benchmarks.report import Report
from benchmarks.speed import Effort, Speed, measure_cost, measure_speed, warm_up
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig

WARM_UP_TOKENS = 1024
FILE_WIDTH = 120  # columns where stdout is no terminal
LENGTHS_HELP = "Tokens of context, separated by commas; what the model was not trained for tells costs only."


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        lengths: tokens of context, ascending; those beyond what the model was trained for tell costs only.
        budgets: of the store, besides a full one; the last is the one that memory is told for.
        effort: of the timing.
        quality_context, quality_tokens, quality_places: tokens of context, tokens predicted after them, and
            at how many places of the text; no places leave quality out.
        quality_budgets: of the store.
        memory_peers: dense peers whose memory is measured too; empty leaves memory out.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8064, 32_768)
    budgets: tuple[float, ...] = (0.2, 0.1)
    effort: Effort = field(default_factory=Effort)
    quality_context: int = 4096
    quality_tokens: int = 256
    quality_places: int = 3
    quality_budgets: tuple[float, ...] = (0.1, 0.05)
    memory_peers: tuple[str, ...] = DENSE_PEERS

    @property
    def quality_size(self) -> int:
        """Tokens of one place."""
        return self.quality_context + self.quality_tokens + 1

    def longest_prompt(self, trained_tokens: int | None) -> int:
        """Tokens of the longest prompt that a model trained for so many can read and go on from; None: any."""
        if trained_tokens is None:
            return max(self.lengths)
        return max(1, trained_tokens + 1 - self.effort.tokens_after)

    def tokens_needed(self, trained_tokens: int | None) -> int:
        """Tokens that the text must have."""
        speed = min(max(self.lengths), self.longest_prompt(trained_tokens)) + self.effort.tokens_after
        return max(speed, self.quality_size) if self.quality_places else speed


QUICK = Options(
    lengths=(1024,),
    budgets=(0.1,),
    effort=Effort(prompts=1, blocks=2),
    quality_context=1024,
    quality_tokens=32,
    quality_places=1,
    quality_budgets=(0.1,),
    memory_peers=(),
)


def run_decode(
    model: Any,
    ids: torch.Tensor,
    options: Options,
    report: Report,
    tell: Tell,
    *,
    load: Callable[[], Any] | None = None,
    configs: Mapping[str, StoreConfig] | None = None,
    trained_tokens: int | None = None,
) -> None:
    """Run everything on ids, int64 [>= options.tokens_needed(trained_tokens)], and add the rows to the report.

    `trained_tokens` are those of the context that the model was trained for, None where any length is one. `load`
    returns the model in another process; without it memory is left out. `configs` stand in for `index_configs()`;
    that of the default index is the one that is timed.
    """
    settings = dict(configs or index_configs())
    tell("warming up")
    warm_up(model, ids[:WARM_UP_TOKENS], (None, *options.budgets), settings[DEFAULT])
    longest = options.longest_prompt(trained_tokens)
    speeds = {}
    for length, speed in _speeds(model, ids, longest, options, settings[DEFAULT], tell):
        decode_rows.add_speed(report, length, speed, options.budgets)
        decode_rows.add_splits(report, length, speed)
        if load is not None and options.memory_peers and not speed.cost_only:
            at = _prefixed(tell, f"{length} tokens")
            decode_rows.add_memory(report, length, _memory(load, ids, length, options, at))
        speeds[length] = speed
    if speeds:
        decode_rows.add_break_even(report, speeds, options.budgets)
    if options.quality_places:
        stretches = inputs.places(ids, options.quality_size, options.quality_places)
        spots = [Place(stretch, options.quality_context, options.quality_tokens) for stretch in stretches]
        found = measure_quality(model, spots, options.quality_budgets, settings, _prefixed(tell, "quality"))
        decode_rows.add_quality(report, options.quality_context, options.quality_tokens, options.quality_budgets, found)


def _speeds(
    model: Any, ids: torch.Tensor, longest: int, options: Options, config: StoreConfig, tell: Tell
) -> Iterator[tuple[int, Speed]]:
    """Give each length and what was measured there: after prompts up to `longest` tokens, in filled caches above."""
    budgets, effort = (None, *options.budgets), options.effort
    passage: Passage | None = None
    for length in options.lengths:
        if length <= longest:
            at = _prefixed(tell, f"{length} tokens")
            yield length, measure_speed(model, ids, length, budgets, effort, at, config)
            continue
        at = _prefixed(tell, f"{length} tokens, cost only")
        if passage is None:
            at(f"reading {longest} tokens")
            passage = read_passage(model, ids, longest)
        if passage.fits(length):
            yield length, measure_cost(model, passage, length, budgets, effort, at, config)
        else:
            at("LEFT OUT, memory has no room for it")


def _prefixed(tell: Tell, where: str) -> Tell:
    return lambda line: tell(f"{where}: {line}")


def _memory(load: Callable[[], Any], ids: torch.Tensor, length: int, options: Options, tell: Tell) -> dict[str, Usage]:
    import torch

    tokens = ids[: length + options.effort.block_tokens].tolist()
    found = {}
    for name in (*options.memory_peers, STORE):
        tell(f"memory, {name}")
        budget = options.budgets[-1] if name == STORE else None
        found[name] = measure_memory(Probe(load, name, budget, tokens, length, torch.get_num_threads()))
    return found


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One short length, few tokens: two minutes.")] = False,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS_HELP)] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Prompts of each engine at a length.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of 32 tokens each engine decodes.")] = None,
    quality: Annotated[bool, typer.Option(help="Compare predictions with those of full attention.")] = True,
    places: Annotated[int | None, typer.Option(min=1, help="Places of the text to compare them at.")] = None,
    memory: Annotated[bool, typer.Option(help="Measure memory, each engine in a process of its own.")] = True,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch and Numba (their choice).")] = None,
) -> None:
    """Speed, memory and quality of decoding with the store beside transformers' own caches, in one run."""
    base = QUICK if quick else Options()
    effort = replace(base.effort, prompts=repeats or base.effort.prompts, blocks=blocks or base.effort.blocks)
    options = replace(
        base,
        lengths=base.lengths if lengths is None else _lengths(lengths),
        effort=effort,
        quality_places=(places or base.quality_places) if quality else 0,
        memory_peers=base.memory_peers if memory else (),
    )
    report = _run(options, model, text, threads)
    if json is not None:
        report.write(json)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(part) for part in text.replace("_", "").split(",")}))
    except ValueError:
        raise typer.BadParameter(f"lengths are whole numbers separated by commas, not {text!r}") from None
    if lengths[0] < 1:
        raise typer.BadParameter(f"lengths must be at least 1, not {lengths[0]}")
    return lengths


def _run(options: Options, path: str | None, text: Path | None, threads: int | None) -> Report:
    if threads is not None:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)
    import torch
    from rich.console import Console

    from benchmarks.machine import describe_machine
    from benchmarks.progress import Progress
    from kvstore.adapters.model_files import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    report = Report("decode", describe_machine())
    try:
        with Progress() as tell:
            loaded = load_model(path, report=tell)
            ids = inputs.tokens_of(inputs.read_text(text), loaded.tokenizer)
            _check_text(options, len(ids), loaded.context_tokens)
            run_decode(
                loaded.model,
                ids,
                options,
                report,
                tell,
                load=functools.partial(inputs.load_model_only, path),
                trained_tokens=loaded.context_tokens,
            )
    finally:
        if report.rows:  # also those of a run that was stopped; only a complete one becomes JSON
            console = Console()
            console.print(report.table(), width=None if console.is_terminal else FILE_WIDTH)
    return report


def _check_text(options: Options, n_tokens: int, context_tokens: int | None) -> None:
    needed = options.tokens_needed(context_tokens)
    if n_tokens < needed:
        raise typer.BadParameter(f"the text has {n_tokens} tokens; these lengths need {needed}")
    if context_tokens is not None and needed > context_tokens + 1:
        raise typer.BadParameter(f"quality needs {needed} tokens; the model was trained for {context_tokens}")


if __name__ == "__main__":
    app()
