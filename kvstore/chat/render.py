"""From messages to the tokens that a model is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from kvstore.chat.transcript import Message
from kvstore.errors import InvalidQueryError


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer knows how its model wants a conversation to be written."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(tokenizer: Any, messages: Iterable[Message], *, answer: bool = True) -> list[int]:
    """Return the tokens of a conversation, up to where the model's answer begins (or, without `answer`, its end).

    By the tokenizer's chat template; without one the contents follow each other line by line, for a model that
    continues texts. Raises `InvalidQueryError` for a conversation that the template refuses.
    """
    if not has_template(tokenizer):
        text = "".join(f"{message.content}\n" for message in messages)
        plain: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return plain
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [asdict(message) for message in messages], tokenize=False, add_generation_prompt=answer
        )
    except TemplateError as error:
        raise InvalidQueryError(f"the model's chat template refuses the conversation: {error}") from error
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # the template's are in
    return tokens
