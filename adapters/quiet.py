"""Keeps a library's own notes and progress bars out of a program's output for a while."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' log lines below errors and its progress bars; put both back at the end."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def without_bars() -> Iterator[None]:
    """Drop from stderr what redraws a line, as tqdm does; some of transformers' bars have no other switch."""
    with redirect_stderr(_WithoutBars(sys.stderr)):
        yield


class _WithoutBars(io.TextIOBase):
    """Passes text on to another stream, except lines that begin with a carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._after_bar = False

    def write(self, text: str) -> int:
        is_bar = text.startswith("\r") or (self._after_bar and text == "\n")
        if text:
            self._after_bar = text.startswith("\r")
        return len(text) if is_bar else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
