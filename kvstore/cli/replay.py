"""`kvstore replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.errors import one_line_errors
from kvstore.cli.output import STDOUT, check_folder, check_matplotlib, write_json
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.replay.policies import SizeResult
    from kvstore.replay.trace import BlockTrace

EXAMPLES = (
    "Examples:\n\nkvstore replay blocks.npz\n\n"
    "kvstore replay blocks.npz --sizes 2.5,10,40 --policy lru --policy score-decay --plot pool.png --json pool.json"
)

CAPTION = (
    "hit rate: blocks found of those looked up; of best: hits as a share of Belady's; rows: selected rows in blocks "
    "found, a share; loaded: blocks let in, and how many a step"
)


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="File that kvstore trace wrote.")],
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="LIST", help="Sizes of the pool, in % of the blocks of all layers.")
    ] = "5,10,20",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="NAME", help="Policy to run, may be repeated; left out, all.", show_default=False
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens", metavar="N", min=1, help="Rows of a block, a multiple of the trace's; left out, those."
        ),
    ] = None,
    admit: Annotated[
        int | None,
        typer.Option(
            "--admit",
            metavar="BLOCKS",
            min=0,
            help="Blocks that a layer may let in at each step; left out, three quarters of the pool in a step.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rates over sizes (needs matplotlib).")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout, without a table."),
    ] = None,
) -> None:
    """Run the buffer pool's replacement policies over a recorded trace, beside the best possible.

    That is Belady's: it knows the future and keeps what is used again soonest. One pool serves all layers. Hit rates
    are shares of the blocks looked up; blocks loaded are those let in, each of which has to be copied.
    """
    with one_line_errors():
        for file in (plot, json_file):
            check_folder(file)
        if plot is not None:
            check_matplotlib()
        shares = _shares(sizes)
        read, found = _run(trace, shares, policy, block_tokens, admit)
        if json_file is not None:
            write_json(json_file, _plain(read, found))
        if json_file != STDOUT:
            _show(read, found)
        if plot is not None:
            from kvstore.cli.replay_plot import draw

            draw(read, found, plot)


def _shares(text: str) -> list[float]:
    """Read percentages separated by commas, as shares; raises `ConfigError`."""
    try:
        return [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"sizes are percentages separated by commas, such as 5,10,20, not {text!r}") from None


def _run(
    path: Path, shares: list[float], policies: list[str] | None, block_tokens: int | None, admit: int | None
) -> tuple[BlockTrace, list[SizeResult]]:
    from kvstore.cli.progress import Stages
    from kvstore.replay.policies import replay as run
    from kvstore.replay.trace import read_block_trace

    trace = read_block_trace(path)
    if block_tokens is not None:
        trace = trace.in_blocks_of(block_tokens)
    with Stages() as stages:
        return trace, run(trace, shares, policies, admit_blocks=admit, tell=stages)


def _plain(trace: BlockTrace, found: list[SizeResult]) -> dict[str, Any]:
    return {
        "model": trace.model,
        "n_layers": trace.n_layers,
        "n_steps": trace.n_steps,
        "n_blocks": trace.n_blocks,
        "block_tokens": trace.block_tokens,
        "blocks_a_step": len(trace.blocks) / trace.n_steps,
        "sizes": [one.as_dict() for one in found],
    }


def _show(trace: BlockTrace, found: list[SizeResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{trace.model}: " if trace.model else ""
    a_step = f"{len(trace.blocks) / trace.n_steps:,.0f} of {trace.total_blocks:,} blocks of {trace.block_tokens} rows"
    console = Console()
    console.print(f"{title}{trace.n_steps} steps, each reads {a_step}", highlight=False, markup=False, soft_wrap=True)
    table = Table(caption=CAPTION)
    for name in ("pool", "frames"):
        table.add_column(name, justify="right")
    table.add_column("policy")
    for name in ("hit rate", "of best", "rows", "loaded", "a step"):
        table.add_column(name, justify="right")
    for one in found:
        lookups = one.policies[0].lookups
        table.add_section()
        best = f"{one.best_hits / lookups:.3f}"
        table.add_row(
            f"{100 * one.share:g} %", f"{one.n_frames:,}", "Belady", best, "100.0 %", "", "", "", style="bold"
        )
        for each in one.policies:
            table.add_row(
                "", "", each.policy, f"{each.hit_rate:.3f}", f"{100 * one.of_best(each):.1f} %",
                f"{each.row_rate:.3f}", f"{each.loaded:,}", f"{each.loaded / trace.n_steps:,.1f}",
            )  # fmt: skip
    console.print(table)
