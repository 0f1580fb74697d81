"""From the user's text to the tokens that a model is given."""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore.adapters.model_files import LoadedModel
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
    tokenizer = loaded.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise InvalidQueryError(f"{loaded.name} has no chat template; use --raw")
    if not has_template or chat is False:
        raw: list[int] = tokenizer(text)["input_ids"]
        return raw
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]  # the template has brought them
    return tokens


def check_length(loaded: LoadedModel, n_prompt: int, n_new: int) -> None:
    """Raise `InvalidQueryError` when prompt and new tokens go beyond what the model was trained for."""
    limit = loaded.context_tokens
    if limit is not None and n_prompt + n_new > limit:
        raise InvalidQueryError(
            f"the prompt has {n_prompt} tokens; with {n_new} new ones that is more than the {limit} that {loaded.name} "
            "was trained for: shorten it or lower --max-new-tokens"
        )
