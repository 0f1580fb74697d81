"""Errors of the user's making become one line on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from kvstore.cli.extras import missing_extra
from kvstore.errors import KVStoreError


def fail(message: str) -> NoReturn:
    """Print one line on stderr and end with exit code 2."""
    typer.echo(f"kvstore: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn this package's errors and missing libraries into `fail`; anything else is a bug and keeps its traceback."""
    try:
        yield
    except KVStoreError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if (line := missing_extra(error)) is None:
            raise
        fail(line)
