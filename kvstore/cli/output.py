"""Files that commands write besides what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from kvstore.cli.errors import fail

STDOUT = Path("-")


def check_folder(file: Path | None) -> None:
    """Fail, before any work is done, where the folder of a file to be written is missing."""
    if file is not None and file != STDOUT and not file.absolute().parent.is_dir():
        fail(f"cannot write {file}: there is no directory {file.absolute().parent}")


def check_matplotlib() -> None:
    """Fail, before any work is done, where pictures cannot be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        fail('matplotlib is not installed; run: pip install "kvstore-engine[plot]", or leave --plot out')


def write_json(file: Path, data: Any) -> None:
    """Write plain values as JSON into a file, or to stdout for "-"."""
    text = json.dumps(data, indent=1)
    if file == STDOUT:
        typer.echo(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")
