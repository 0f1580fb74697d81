"""`kvstore capture`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.errors import fail, one_line_errors
from kvstore.cli.options import Dtype, DtypeOption, ModelOption, ThreadsOption, threads
from kvstore.errors import InvalidQueryError

EXAMPLES = (
    "Examples:\n\nkvstore capture --text book.txt --out traces\n\n"
    "kvstore capture --model ./qwen3 --text book.txt --out traces --layers 5,20 --tokens 16384"
)


def capture(
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text to read; - is stdin.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of the traces; made if need be.")],
    model: ModelOption = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=16, help="Tokens of the text to read.")] = 8192,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="LIST",
            help="Layers to record, for example 3,14; left out, four spread over the model.",
            show_default=False,
        ),
    ] = None,
    queries: Annotated[
        int, typer.Option("--queries", metavar="N", min=1, help="Last positions whose queries are kept.")
    ] = 64,
    dtype: DtypeOption = Dtype.float32,
    threads_: ThreadsOption = None,
) -> None:
    """Record keys, values and queries of a model while it reads a text: what indexes are measured and tuned on.

    One safetensors file a layer, in float16: k, v [KV heads, tokens, dim], q [query heads, queries, dim], k_pre.
    """
    with one_line_errors(), threads(threads_):
        wanted = None if layers is None else _numbers(layers)
        _run(text, out, model, str(dtype), tokens, wanted, queries)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidQueryError(f"layers are numbers separated by commas, not {text!r}") from None


def _run(
    text: Path, out: Path, path: Path | None, dtype: str, n_tokens: int, layers: list[int] | None, n_queries: int
) -> None:
    from kvstore.adapters.hf.capture import capture as record
    from kvstore.adapters.hf.capture import default_layers
    from kvstore.adapters.model_files import load_model
    from kvstore.cli.progress import Stages
    from kvstore.cli.prompt import read_prompt

    words = read_prompt(text)
    with Stages() as stages:
        loaded = load_model(path, dtype, stages)
        ids = loaded.tokenizer(words, verbose=False)["input_ids"]
        check_length(len(ids), n_tokens, loaded)
        wanted = default_layers(loaded.model) if layers is None else layers
        traces = record(loaded.model, ids[:n_tokens], wanted, n_queries=n_queries, name=loaded.name, tell=stages)
    for trace in traces:
        typer.echo(str(_write(out, loaded.name, trace)))


def check_length(n_text: int, n_tokens: int, loaded: Any) -> None:
    """Raise `InvalidQueryError` when a text has fewer than n_tokens tokens, or the model was trained for fewer."""
    if n_text < n_tokens:
        raise InvalidQueryError(f"the text has {n_text} tokens, fewer than {n_tokens}: give more, or --tokens {n_text}")
    limit = loaded.context_tokens
    if limit is not None and n_tokens > limit:
        raise InvalidQueryError(f"{loaded.name} was trained for {limit} tokens: lower --tokens from {n_tokens}")


def _write(out: Path, name: str, trace: Any) -> Path:
    from kvstore.traces import SUFFIX, write_trace

    file = out / f"{name}_layer{trace.layer:02d}{SUFFIX}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_trace(file, trace)
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")
    return file
