"""From the user's text to the tokens that a model is given."""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.adapters.model_files import LoadedModel
from kvstore.chat.render import has_template, render
from kvstore.chat.transcript import USER, Message
from kvstore.errors import InvalidQueryError


def read_prompt(file: Path) -> str:
    """Return a file's text ("-": stdin); raises `InvalidQueryError` when it cannot be read or holds nothing."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidQueryError(f"cannot read the prompt {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidQueryError(f"the prompt {file} is not UTF-8 text") from error
    if not text.strip():
        raise InvalidQueryError(f"the prompt {file} is empty")
    return text


def encode_prompt(loaded: LoadedModel, text: str, chat: bool | None) -> list[int]:
    """Return the tokens of a prompt, as a chat message or as it is; None: as a chat if the model has a template.

    Raises `InvalidQueryError` when a chat is asked of a model without a template.
    """
    knows_chats = has_template(loaded.tokenizer)
    if chat and not knows_chats:
        raise InvalidQueryError(f"{loaded.name} has no chat template; use --raw")
    if not knows_chats or chat is False:
        raw: list[int] = loaded.tokenizer(text)["input_ids"]
        return raw
    return render(loaded.tokenizer, [Message(USER, text)])


def check_length(loaded: LoadedModel, n_prompt: int, n_new: int) -> None:
    """Raise `InvalidQueryError` when prompt and new tokens go beyond what the model was trained for."""
    limit = loaded.context_tokens
    if limit is not None and n_prompt + n_new > limit:
        raise InvalidQueryError(
            f"the prompt has {n_prompt} tokens; with {n_new} new ones that is more than the {limit} that {loaded.name} "
            "was trained for: shorten it or lower --max-new-tokens"
        )
