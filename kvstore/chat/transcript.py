"""What was said, in a small file beside the rows."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, CorruptStoreError, UnsupportedFormatError
from kvstore.storage.files import read_capped, remove_parts, write_atomic

FORMAT = 1
MAX_BYTES = 64 << 20
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Message:
    """Who said what: role "system", "user" or "assistant"."""

    role: str
    content: str


class Transcript:
    """The messages of one conversation, in `chat-NAME.json` in the store's directory.

    Text is a file of its own because tokens do not give it back (decoding loses what the tokenizer has normalised), and
    because people can read it. It lies inside the directory, so that it moves with the rows and the directory's lock
    keeps a second writer out. It is replaced whole after each turn, before the rows are flushed: rows can be computed
    again from the text, not the other way round. Where the two disagree, the rows' tokens decide what is read again.

    Attributes:
        messages: in order; a system message, if any, is the first.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Read the conversation; without a file it is empty.

        Raises `ConfigError` for a name that cannot be part of a file's, `CorruptStoreError` for a damaged file and
        `UnsupportedFormatError` for one of a newer version.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a conversation's name is 1 to 64 letters, digits, dots, dashes or _, not {name!r}")
        self._path = directory / f"chat-{name}.json"
        self.messages: list[Message] = []
        with suppress(FileNotFoundError):
            self.messages = self._parsed(read_capped(self._path, MAX_BYTES))

    def save(self) -> None:
        """Replace the file, on disk when this returns; raises `StorageError` or `ReadOnlyStoreError`."""
        plain = {"format": FORMAT, "messages": [asdict(message) for message in self.messages]}
        remove_parts(self._path.parent, self._path.name)
        write_atomic(self._path, json.dumps(plain, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def _parsed(self, data: bytes) -> list[Message]:
        try:
            plain: Any = json.loads(data)
            self._check_format(plain["format"])
            messages = [Message(**message) for message in plain["messages"]]
        except UnsupportedFormatError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from None
        for place, message in enumerate(messages):
            roles = (SYSTEM, USER, ASSISTANT) if place == 0 else (USER, ASSISTANT)
            if message.role not in roles or type(message.content) is not str:
                raise self._damaged(f"message {place} is none")
        return messages

    def _check_format(self, number: Any) -> None:
        if type(number) is not int:
            raise TypeError(f"format is {number!r}")
        if number > FORMAT:
            raise UnsupportedFormatError(f"{self._path} is of format {number}, not {FORMAT}; use a newer version")

    def _damaged(self, what: str) -> CorruptStoreError:
        return CorruptStoreError(
            f"{self._path} is damaged ({what}); put it back from a backup, or remove it to begin the conversation anew"
        )
