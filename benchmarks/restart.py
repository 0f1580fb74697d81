"""How much sooner does a model answer when the text that it has read is on disk?

One process reads a text with a store in a directory and closes it. Others then open the directory and compute one
token more; beside them the text is read again, into transformers' own cache. Every process loads the model first, which
is not timed. A process that opens the directory either has its kernels loaded with the model (`kvstore.warmup`), as a
server has, or loads them while the clock runs. The logits after the restart are compared with those of the process that
had read the text.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from benchmarks.report import Metric, Report
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

FIRST = Metric("time to first token", "s", "lower")
OPEN = Metric("of it, opening and reading rows and indexes", "s", "neither")
SAVE = Metric("closing after the text was read", "s", "neither")
SIZE = Metric("on disk", "MiB", "neither")
LOGITS = Metric("largest difference of a logit after the restart", "logits", "neither")
PREFILL, STORE_PREFILL, NONE = "reading again, DynamicCache", "reading again, store", "none"
NAME = "text"
COLD = "kernels not loaded before"

Load = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """Tokens of the text, and how often each process is started."""

    lengths: tuple[int, ...] = (8064,)
    repeats: int = 3


QUICK = Options(lengths=(512,), repeats=1)


@dataclass(frozen=True)
class Read:
    """What the process that read the text found; times in seconds, logits float32 [vocabulary]."""

    first_token_s: float
    close_s: float
    logits: Any


@dataclass(frozen=True)
class Reopened:
    """What a process that opened the directory found."""

    open_s: float
    first_token_s: float
    logits: Any


def read_text(load: Load, path: Path, ids: Sequence[int]) -> Read:
    """Read ids but the last into a new store, then compute the last; the rows on disk are those before it."""
    from kvstore.adapters.hf import StoreCache, open_store, use_store_attention

    model = load()
    with use_store_attention(model):
        started = time.perf_counter()
        store = open_store(path, model)
        cache = StoreCache(model, store=store, name=NAME)
        _forward(model, cache, ids[:-1])
        prefill_s = time.perf_counter() - started
        cache.close()
        store.checkpoint()
        started = time.perf_counter()
        logits = _forward(model, cache, ids[-1:])
        step_s = time.perf_counter() - started
        store[NAME].truncate(len(ids) - 1)
        started = time.perf_counter()
        store.close()
    return Read(prefill_s + step_s, time.perf_counter() - started, logits)


def reopen(load: Load, path: Path, ids: Sequence[int], warm: bool) -> Reopened:
    """Open the directory and compute the last of ids; with `warm` kernels are loaded before."""
    from kvstore import StoreConfig, warmup
    from kvstore.adapters.hf import StoreCache, open_store, schema_of, use_store_attention

    model = load()
    if warm:
        warmup(schema_of(model, range(model.config.num_hidden_layers)), StoreConfig())
    with use_store_attention(model):
        started = time.perf_counter()
        with open_store(path, model) as store:
            cache = StoreCache(model, store=store, name=NAME)
            open_s = time.perf_counter() - started
            logits = _forward(model, cache, ids[-1:])
            first_token_s = time.perf_counter() - started
            cache.close()
            store[NAME].truncate(len(ids) - 1)
    return Reopened(open_s, first_token_s, logits)


def read_again(load: Load, path: Path, ids: Sequence[int]) -> float:
    """Read ids into transformers' own cache; seconds to the first token."""
    from transformers import DynamicCache

    model = load()
    started = time.perf_counter()
    _forward(model, DynamicCache(config=model.config), ids)
    return time.perf_counter() - started


def _forward(model: Any, cache: Any, ids: Sequence[int]) -> Any:
    import torch

    from kvstore.adapters.hf import cache_argument

    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(ids)]), logits_to_keep=1, **{cache_argument(model): cache})
    return out.logits[0, -1].float().numpy().copy()


def run_restart(load: Load, ids: torch.Tensor, options: Options, report: Report, tell: Tell) -> None:
    """Measure every length and add the rows."""
    for length in options.lengths:
        tokens = ids[: length + 1].tolist()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            tell(f"{length} tokens: reading")
            read = in_process(read_text, load, path, tokens)
            disk_bytes = sum(file.stat().st_blocks * 512 for file in path.iterdir())
            opened, cold, again = [], [], []
            for number in range(options.repeats):
                tell(f"{length} tokens, round {number + 1} of {options.repeats}: opening")
                opened.append(in_process(reopen, load, path, tokens, True))
                cold.append(in_process(reopen, load, path, tokens, False))
                tell(f"{length} tokens, round {number + 1} of {options.repeats}: reading again")
                again.append(in_process(read_again, load, path, tokens))
        _add(report, length, read, (opened, cold), again, disk_bytes)


def _add(
    report: Report,
    length: int,
    read: Read,
    found: tuple[list[Reopened], list[Reopened]],
    again: list[float],
    disk_bytes: int,
) -> None:
    case, peer_s = f"{length} tokens", statistics.median(again)
    for where, runs in zip((case, f"{case}, {COLD}"), found, strict=True):
        first_s = statistics.median(run.first_token_s for run in runs)
        report.add(where, FIRST, first_s, PREFILL, peer_s)
        report.add(f"{where}, once", FIRST, first_s, STORE_PREFILL, read.first_token_s)
        report.add(where, OPEN, statistics.median(run.open_s for run in runs), NONE, None)
    report.add(case, SAVE, read.close_s, NONE, None)
    report.add(case, SIZE, disk_bytes / 2**20, NONE, None)
    wrong = max(float(np.abs(run.logits - read.logits).max()) for runs in found for run in runs)
    report.add(case, LOGITS, wrong, NONE, None)


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what work returns in a new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, work, *arguments))
    child.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        raise RuntimeError(f"the process of {work.__name__} ended without an answer") from None
    finally:
        child.join()
        ours.close()
    return found


def _answer(pipe: Any, work: Callable[..., Any], *arguments: Any) -> None:
    pipe.send(work(*arguments))
    pipe.close()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short text, once.")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Processes that open the store.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
) -> None:
    """Time to the first token of a stored text beside reading it again."""
    from functools import partial

    from benchmarks import inputs
    from benchmarks.machine import describe_machine
    from benchmarks.setup import reported
    from kvstore.adapters.model_files import load_model

    base = QUICK if quick else Options()
    options = Options(base.lengths, repeats or base.repeats)
    report = Report("restart", describe_machine())
    with reported(report, json) as tell:
        tokenizer = load_model(model, report=tell).tokenizer
        ids = inputs.tokens_of(inputs.read_text(text), tokenizer)
        if len(ids) <= max(options.lengths):
            raise typer.BadParameter(f"the text has {len(ids)} tokens; {max(options.lengths) + 1} are needed")
        run_restart(partial(inputs.load_model_only, model), ids, options, report, tell)


if __name__ == "__main__":
    app()
