"""Is decoding with selection faster than dense decoding, and what does it cost in memory and in quality?"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import decode_rows, inputs
from benchmarks.engines import DENSE_PEERS, STORE
from benchmarks.memory import Probe, Usage, measure_memory
from benchmarks.quality import DEFAULT, Place, index_configs, measure_quality
from benchmarks.report import Report
from benchmarks.speed import Effort, Speed, measure_speed, warm_up
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig

WARM_UP_TOKENS = 1024
FILE_WIDTH = 120  # columns where stdout is no terminal


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        lengths: tokens of context, ascending.
        budgets: of the store, besides a full one; the last is the one that memory and break-even are told for.
        effort: of the timing.
        quality_context, quality_tokens, quality_places: tokens of context, tokens predicted after them, and
            at how many places of the text; no places leave quality out.
        quality_budgets: of the store.
        memory_peers: dense peers whose memory is measured too; empty leaves memory out.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8064)
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

    def tokens_needed(self) -> int:
        """Tokens that the text must have."""
        speed = max(self.lengths) + self.effort.tokens_after
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
) -> None:
    """Run everything on ids, int64 [>= options.tokens_needed()], and add the rows to the report.

    `load` returns the model in another process; without it memory is left out. `configs` stand in for
    `index_configs()`; that of the default index is the one that is timed.
    """
    settings = dict(configs or index_configs())
    tell("warming up")
    warm_up(model, ids[:WARM_UP_TOKENS], (None, *options.budgets), settings[DEFAULT])
    speeds: dict[int, Speed] = {}
    for length in options.lengths:
        at = _prefixed(tell, f"{length} tokens")
        budgets = (None, *options.budgets)
        speeds[length] = measure_speed(model, ids, length, budgets, options.effort, at, settings[DEFAULT])
        decode_rows.add_speed(report, length, speeds[length], options.budgets)
        if load is not None and options.memory_peers:
            decode_rows.add_memory(report, length, _memory(load, ids, length, options, at))
    decode_rows.add_break_even(report, speeds, options.budgets[-1])
    if options.quality_places:
        stretches = inputs.places(ids, options.quality_size, options.quality_places)
        spots = [Place(stretch, options.quality_context, options.quality_tokens) for stretch in stretches]
        found = measure_quality(model, spots, options.quality_budgets, settings, _prefixed(tell, "quality"))
        decode_rows.add_quality(report, options.quality_context, options.quality_tokens, options.quality_budgets, found)


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
    lengths: Annotated[str | None, typer.Option(help="Tokens of context, separated by commas.")] = None,
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
            run_decode(loaded.model, ids, options, report, tell, load=functools.partial(inputs.load_model_only, path))
    finally:
        if report.rows:  # also those of a run that was stopped; only a complete one becomes JSON
            console = Console()
            console.print(report.table(), width=None if console.is_terminal else FILE_WIDTH)
    return report


def _check_text(options: Options, n_tokens: int, context_tokens: int | None) -> None:
    if n_tokens < options.tokens_needed():
        raise typer.BadParameter(f"the text has {n_tokens} tokens; these lengths need {options.tokens_needed()}")
    if context_tokens is not None and options.tokens_needed() > context_tokens + 1:
        raise typer.BadParameter(
            f"these lengths need {options.tokens_needed()} tokens; the model was trained for {context_tokens}"
        )


if __name__ == "__main__":
    app()
