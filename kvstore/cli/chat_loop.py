"""The conversation in a terminal: lines in, answers and figures out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import typer
from rich.console import Console

from kvstore.chat.conversation import Conversation
from kvstore.chat.interrupts import interrupts
from kvstore.cli.stream import TextStream
from kvstore.config import MIB
from kvstore.errors import InvalidQueryError, KVStoreError

HELP = """\
/undo   take the last turn back
/reset  forget all turns
/stats  what is stored
/help   this list
/quit   leave, as Ctrl-D does; Ctrl-C stops an answer"""


class ChatLoop:
    """Hands lines to a conversation and shows what comes of it: words on stdout, everything else on stderr."""

    def __init__(self, conversation: Conversation, tokenizer: Any, *, as_json: bool = False) -> None:
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._as_json = as_json
        self._notes = Console(stderr=True)
        self._commands: dict[str, Callable[[], None]] = {
            "/undo": self._undo,
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda: self._note(HELP),
        }

    def greet(self) -> None:
        """Say whether a conversation goes on, and how to get help."""
        turns = self._conversation.n_turns
        before = f"{turns} turns before this, {self._conversation.n_rows:,} rows stored"
        self._note(f"{before if turns else 'a new conversation'}; /help lists commands")

    def run(self, lines: Iterable[str], *, forgiving: bool) -> None:
        """Take lines until they end or one is /quit. If `forgiving`, an error ends a turn and not the conversation."""
        for line in map(str.strip, lines):
            if line == "/quit":
                return
            try:
                self._take(line)
            except KVStoreError as error:
                if not forgiving:
                    raise
                self._note(str(error))

    def say(self, text: str) -> None:
        """Have one turn."""
        stream = TextStream(self._tokenizer, self._write)
        stream.put(torch.empty(0))  # what it takes for the prompt
        with interrupts() as interrupted:
            turn = self._conversation.say(text, lambda token: stream.put(torch.tensor([token])), interrupted)
        stream.end()
        if self._as_json:
            typer.echo(json.dumps(turn.as_dict()))
            return
        typer.echo()
        self._note(str(turn))

    def _take(self, line: str) -> None:
        if not line.startswith("/"):
            if line:
                self.say(line)
        elif (command := self._commands.get(line)) is not None:
            with interrupts():  # a change of the store is not to be cut in two
                command()
        else:
            self._note(f"there is no command {line.split()[0]}; /help lists them")

    def _undo(self) -> None:
        asked = self._conversation.undo()
        self._note("there is no turn to take back" if asked is None else f"taken back: {asked}")

    def _reset(self) -> None:
        self._conversation.reset()
        self._note("all turns are forgotten")

    def _stats(self) -> None:
        found = self._conversation.stats()
        share = found.counters.rows_attended / max(1, found.counters.rows_available)
        index = f"{found.index_bytes_per_key:.1f} bytes a key" if found.index_bytes else "none"
        self._note(
            f"{self._conversation.n_turns} turns, {self._conversation.n_rows:,} rows stored\n"
            f"store: {found.heap_used_bytes / MIB:.1f} MiB in memory, {found.disk_bytes / MIB:.1f} MiB on disk\n"
            f"index: {index}; steps since the start read {share:.1%} of the rows"
        )

    def _write(self, text: str) -> None:
        if not self._as_json:
            typer.echo(text, nl=False)

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def keyboard() -> Callable[[], str] | None:
    """Return a function that asks for a line, or None where nobody sits at a terminal."""
    if not sys.stdin.isatty():
        return None
    import readline  # noqa: F401  (gives `input` a history and editing)

    return lambda: input("> ")


def lines_of(ask: Callable[[], str] | None) -> Iterator[str]:
    """Yield the lines that are typed, until Ctrl-D, or (None) those of stdin; Ctrl-C begins a line anew."""
    if ask is None:
        try:
            yield from sys.stdin
        except UnicodeDecodeError:
            raise InvalidQueryError("stdin is not UTF-8 text") from None
        return
    while True:
        try:
            yield ask()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
