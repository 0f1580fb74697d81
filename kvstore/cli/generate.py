"""`kvstore generate`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.errors import fail, one_line_errors
from kvstore.cli.options import BUDGET_HELP, Dtype, DtypeOption, ModelOption, ThreadsOption, parse_budget, threads
from kvstore.config import StoreConfig

EXAMPLES = (
    "Examples:\n\nkvstore generate --prompt-file question.txt\n\n"
    "kvstore generate --model ./qwen3 --prompt-file book.txt --budget 512\n\n"
    "kvstore generate --prompt-file book_and_question.txt --store book.kv"
)


def generate(
    prompt_file: Annotated[Path, typer.Option("--prompt-file", metavar="FILE", help="Text to continue; - is stdin.")],
    model: ModelOption = None,
    budget: Annotated[str, typer.Option("--budget", metavar="ROWS", help=BUDGET_HELP)] = "0.1",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens to write at most.")
    ] = 128,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Give the text as a chat message, or as it is; left out, as a chat if the model knows how.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="Keep what is read here; what is here already is not read again."),
    ] = None,
    sinks: Annotated[int, typer.Option("--sinks", metavar="N", help="First rows, read in every step.")] = 4,
    window: Annotated[int, typer.Option("--window", metavar="N", help="Last rows, read in every step.")] = 64,
    dtype: DtypeOption = Dtype.float32,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Write what ran when: a trace for ui.perfetto.dev, or a picture if the name ends in .png.",
        ),
    ] = None,
    threads_: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text and figures as JSON at the end.")] = False,
) -> None:
    """Continue a text, greedily, reading a part of the KV cache a step.

    The text goes to stdout as it comes, then a line with figures to stderr. The prompt is read densely. With --store
    the tokens that a prompt has in common with one before, from the first on, are taken from the disk.
    """
    with one_line_errors():
        config = StoreConfig(budget=parse_budget(budget), sinks=sinks, window=window)
        if timeline is not None and timeline.suffix == ".png" and find_spec("matplotlib") is None:
            fail("matplotlib is not installed; run: pip install matplotlib, or name a .json file")
        with threads(threads_):
            _run(prompt_file, model, dtype, config, max_new_tokens, chat, store, as_json, timeline)


def _run(
    prompt_file: Path,
    model: Path | None,
    dtype: str,
    config: StoreConfig,
    n_new: int,
    chat: bool | None,
    store: Path | None,
    as_json: bool,
    timeline: Path | None,
) -> None:
    from kvstore.adapters.model_files import load_model
    from kvstore.cli.generation import generate_text
    from kvstore.cli.progress import Stages
    from kvstore.cli.prompt import check_length, encode_prompt, read_prompt

    text = read_prompt(prompt_file)
    with Stages() as stages:
        loaded = load_model(model, str(dtype), stages)
    prompt = encode_prompt(loaded, text, chat)
    check_length(loaded, len(prompt), n_new)
    result = generate_text(loaded, prompt, config, n_new, _silent if as_json else _print, store, timeline)
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    typer.echo()
    typer.echo(str(result), err=True)


def _print(text: str) -> None:
    typer.echo(text, nl=False)


def _silent(text: str) -> None:
    pass
