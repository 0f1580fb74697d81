"""`kvstore tune`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.errors import one_line_errors
from kvstore.cli.options import ThreadsOption, threads
from kvstore.cli.output import check_folder, check_matplotlib, write_json

if TYPE_CHECKING:
    from kvstore.tuning import Tuning

EXAMPLES = (
    "Examples:\n\nkvstore tune --traces traces --out config.json\n\n"
    "kvstore tune --traces traces --kinds pq,sq4 --budget 0.05 --plot pareto.png"
)


def tune(
    traces: Annotated[Path, typer.Option("--traces", metavar="DIR", help="Directory that kvstore capture wrote.")],
    budget: Annotated[
        float, typer.Option("--budget", metavar="SHARE", help="Share of the rows picked, besides sinks and window.")
    ] = 0.1,
    kinds: Annotated[
        str | None,
        typer.Option("--kinds", metavar="LIST", help="Kinds of index to try; left out, all.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the settings chosen, for StoreConfig.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw quality over bytes (needs matplotlib).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all trials as JSON.")] = None,
    threads_: ThreadsOption = None,
) -> None:
    """Measure kinds and sizes of index on a model's traces, and choose one.

    Chosen is the smallest whose picked rows hold 99 % of the attention that exact selection's hold.
    """
    with one_line_errors(), threads(threads_):
        for file in (out, plot, json_file):
            check_folder(file)
        if plot is not None:
            check_matplotlib()
        found = _run(traces, budget, None if kinds is None else kinds.split(","))
        _show(found)
        if out is not None:
            write_json(out, asdict(found.config))
        if json_file is not None:
            write_json(json_file, found.as_dict())
        if plot is not None:
            from kvstore.cli.tune_plot import draw

            draw(found, plot)


def _run(directory: Path, budget: float, kinds: list[str] | None) -> Tuning:
    from kvstore.cli.progress import Stages
    from kvstore.traces import read_traces
    from kvstore.tuning import default_grid
    from kvstore.tuning import tune as run

    found = read_traces(directory)
    with Stages() as stages:
        return run(found, default_grid(found[0], kinds), budget, stages)


def _show(found: Tuning) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = f"exact selection: mid {found.exact.mid:.3f}, oerr {found.exact.oerr:.3f}; * on the Pareto front"
    table = Table(title=f"picking {found.budget:.3g} of the rows", caption=caption)
    table.add_column("index")
    for name in ("recall", "mid", "oerr", "bytes a key", "search, ms", ""):
        table.add_column(name, justify="right")
    for trial in found.trials:
        quality = (trial.quality.rec, trial.quality.mid, trial.quality.oerr)
        figures = [*(f"{x:.3f}" for x in quality), f"{trial.bytes_per_key:g}", f"{trial.search_ms:.2f}"]
        style = "bold" if trial is found.chosen else None
        table.add_row(trial.name, *figures, "*" if trial.on_front else "", style=style)
    console = Console()
    console.print(table)
    console.print(f"chosen: {found.chosen.name}", highlight=False)
