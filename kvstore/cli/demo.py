"""`kvstore demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.errors import one_line_errors
from kvstore.cli.options import BUDGET_HELP, ModelOption, ThreadsOption, parse_budget, threads
from kvstore.cli.output import check_folder, write_json

if TYPE_CHECKING:
    from kvstore.demo.report import DemoReport
    from kvstore.demo.settings import DemoSettings

EXAMPLES = "Examples:\n\nkvstore demo\n\nkvstore demo --context 8192 --budget 0.05 --json out.json"


def demo(
    context: Annotated[
        int, typer.Option("--context", metavar="TOKENS", help="Tokens of text, question and answer.")
    ] = 4096,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="ROWS", help=f"{BUDGET_HELP} May be repeated.", show_default="0.2, 0.1"),
    ] = None,
    depth: Annotated[
        float, typer.Option("--depth", metavar="SHARE", help="Where in the text the number is, 0 to 1.")
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Chooses the hidden number.")] = 0,
    model: ModelOption = None,
    threads_: ThreadsOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file too.")
    ] = None,
) -> None:
    """Hide a number in a long text, and let a model find it with a part of its KV cache.

    The same model answers with full attention, and with the store at each budget. Right or wrong, it exits with 0.
    """
    with one_line_errors():
        from kvstore.demo.settings import DemoSettings

        budgets = tuple(parse_budget(text) for text in budget or ("0.2", "0.1"))
        settings = DemoSettings(context, budgets, depth, seed)
        check_folder(json_file)
        report = _run(settings, model, threads_)
        _show(report)
        if json_file is not None:
            write_json(json_file, report.as_dict())


def _run(settings: DemoSettings, model: Path | None, n_threads: int | None) -> DemoReport:
    from kvstore.adapters.model_files import load_model
    from kvstore.cli.progress import Stages
    from kvstore.demo.run import Demo

    with Stages() as stages, threads(n_threads):
        return Demo(load_model(model, report=stages), settings, stages).run()


def _show(report: DemoReport) -> None:
    from rich.console import Console

    from kvstore.cli.demo_view import show_report

    show_report(report, Console())
