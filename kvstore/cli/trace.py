"""`kvstore trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.errors import one_line_errors
from kvstore.cli.options import BUDGET_HELP, Dtype, DtypeOption, ModelOption, ThreadsOption, parse_budget, threads
from kvstore.cli.output import check_folder

if TYPE_CHECKING:
    from kvstore.budget import Budget
    from kvstore.replay.trace import BlockTrace

EXAMPLES = (
    "Examples:\n\nkvstore trace --out blocks.npz\n\n"
    "kvstore trace --model ./qwen3 --text book.txt --tokens 16384 --budget 512 --out blocks.npz"
)


def trace(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write, an .npz of numbers.")],
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text to read; - is stdin; left out, the demo's.", show_default=False
        ),
    ] = None,
    model: ModelOption = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=2, help="Tokens of the text to read, decoded ones included.")
    ] = 8192,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="How many of them, the last, are decoded one by one.")
    ] = 256,
    budget: Annotated[str, typer.Option("--budget", metavar="ROWS", help=BUDGET_HELP)] = "0.1",
    block_tokens: Annotated[
        int,
        typer.Option(
            "--block-tokens", metavar="N", min=1, help="Rows of a block; replay can join blocks, not cut them."
        ),
    ] = 64,
    dtype: DtypeOption = Dtype.float32,
    threads_: ThreadsOption = None,
) -> None:
    """Record which blocks of the KV cache each layer reads at each step while a model decodes a text.

    Recorded are the rows that a layer selects between sinks and window, counted by block; kvstore replay runs buffer
    pools over them.
    """
    with one_line_errors(), threads(threads_):
        check_folder(out)
        found = _run(text, model, str(dtype), tokens, steps, parse_budget(budget), block_tokens)
        _write(out, found)


def _run(
    text: Path | None, path: Path | None, dtype: str, n_tokens: int, n_steps: int, budget: Budget, block_tokens: int
) -> BlockTrace:
    from kvstore.adapters.hf.block_trace import record_decoding
    from kvstore.adapters.model_files import load_model
    from kvstore.cli.capture import check_length
    from kvstore.cli.progress import Stages
    from kvstore.cli.prompt import read_prompt
    from kvstore.demo.passage import read_passage

    words = read_passage() if text is None else read_prompt(text)
    with Stages() as stages:
        loaded = load_model(path, dtype, stages)
        ids = loaded.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        check_length(len(ids), n_tokens, loaded)
        return record_decoding(
            loaded.model,
            ids[:n_tokens],
            n_steps,
            budget=budget,
            block_tokens=block_tokens,
            name=loaded.name,
            tell=stages,
        )


def _write(out: Path, found: BlockTrace) -> None:
    from kvstore.replay.trace import write_block_trace

    write_block_trace(out, found)
    mean = len(found.blocks) / found.n_batches
    typer.echo(
        f"{found.n_steps} steps of {found.n_layers} layers, {mean:.1f} of {found.n_blocks} blocks of "
        f"{found.block_tokens} rows each, in {out}"
    )
