"""Text as it is generated."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch


class TextStream:
    """A streamer for transformers' `generate`: hands on text piece by piece, and keeps the time.

    Attributes:
        tokens: generated so far.
        times: `perf_counter` at each of them.
    """

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._tokenizer = tokenizer
        self._emit = emit
        self._prompt_seen = False
        self._line_start = 0  # first token that is not yet part of a finished line
        self._emitted = 0  # characters of the unfinished line that are out

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt (the first call) or new tokens, int64 of any shape."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.tokens += tokens.reshape(-1).tolist()
        self.times.append(perf_counter())
        self._flush(last=False)

    def end(self) -> None:
        """Hand on what was held back."""
        self._flush(last=True)

    def _flush(self, last: bool) -> None:
        line = self._tokenizer.decode(self.tokens[self._line_start :], skip_special_tokens=True)
        # a token may end inside a character; what it decodes to then changes with the next one
        whole = line if last else line.rstrip("\ufffd")
        self._emit(whole[self._emitted :])
        self._emitted = max(self._emitted, len(whole))
        if whole.endswith("\n"):  # decoding the whole text at each token would be quadratic in its length
            self._line_start, self._emitted = len(self.tokens), 0
