"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli import capture, chat, demo, generate, replay, stats, store, trace, tune


def build_app() -> typer.Typer:
    """Make the command line application; commands import what they need when they run."""
    app = typer.Typer(
        name="kvstore",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command(epilog=demo.EXAMPLES)(demo.demo)
    app.command(epilog=generate.EXAMPLES)(generate.generate)
    app.command(epilog=chat.EXAMPLES)(chat.chat)
    app.command(epilog=capture.EXAMPLES)(capture.capture)
    app.command(epilog=tune.EXAMPLES)(tune.tune)
    app.command(epilog=trace.EXAMPLES)(trace.trace)
    app.command(epilog=replay.EXAMPLES)(replay.replay)
    app.command(epilog=stats.EXAMPLES)(stats.stats)
    for command in (store.inspect, store.check, store.evict, store.vacuum):
        app.command()(command)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvstore import __version__

        typer.echo(f"kvstore {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep a transformer's KV cache as a database, and attend only to the rows that matter."""
