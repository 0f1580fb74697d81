"""A prompt with a fact hidden in a long text, and the question for it."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidQueryError

INSTRUCTION = (
    "One sentence of the following text tells a magic number. Remember that number while you read. "
    "You will be asked for it after the text.\n\n"
)
QUESTION = "\n\nWhat is the magic number in this text?"
ANSWER_START = "The magic number is"
ANSWER_TOKENS = 10
_TEXT_HERE = "[[the text]]"


@dataclass(frozen=True)
class Needle:
    """A prompt in two parts, and what it takes to judge the answer.

    Attributes:
        context: tokens of the instruction and of the text with the fact in it.
        question: tokens after them: the question and the first words of the answer.
        number: the hidden number.
        sentence: the sentence that hides it.
        place: token of the context at which the sentence begins.
    """

    context: list[int]
    question: list[int]
    number: str
    sentence: str
    place: int

    def is_right(self, answer: str) -> bool:
        """Whether an answer gives the number, digits grouped or not."""
        return self.number in re.sub(r"[ ,]", "", answer)


def hide_needle(tokenizer: Any, text: str, n_tokens: int, depth: float, seed: int) -> Needle:
    """Make a prompt that has, with its answer, n_tokens tokens.

    Args:
        tokenizer: of transformers; its chat template is used if it has one.
        text: cut to the length that is left for it.
        n_tokens: of context, question and answer.
        depth: where in the text the fact stands, 0 (beginning) to 1 (end); moved back to the end of a sentence.
        seed: chooses the number.

    Raises `InvalidQueryError` when the text is too short for n_tokens, or n_tokens too few for the question.
    """
    number = str(random.Random(seed).randrange(10_000, 100_000))
    sentence = f" The magic number is {number}."
    before, after = _around_text(tokenizer)
    question = _encode(tokenizer, after)
    start, fact, words = (_encode(tokenizer, part) for part in (before, sentence, text))
    room = n_tokens - len(start) - len(fact) - len(question) - ANSWER_TOKENS
    if room < 1:
        raise InvalidQueryError(f"{n_tokens} tokens leave no room for text beside the question")
    if room > len(words):
        raise InvalidQueryError(
            f"the text has {len(words)} tokens; a context of {n_tokens} needs {room}: ask for "
            f"{n_tokens - room + len(words)} or fewer"
        )
    words = words[:room]
    cut = _sentence_end(tokenizer, words, round(depth * len(words)))
    context = [*start, *words[:cut], *fact, *words[cut:]]
    return Needle(context, question, number, sentence.strip(), len(start) + cut)


def _around_text(tokenizer: Any) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        return INSTRUCTION, f"{QUESTION} {ANSWER_START}"
    message = {"role": "user", "content": INSTRUCTION + _TEXT_HERE + QUESTION}
    prompt: str = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, _, after = prompt.partition(_TEXT_HERE)
    return before, after + ANSWER_START


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def _sentence_end(tokenizer: Any, tokens: list[int], at: int) -> int:
    while at > 0 and not tokenizer.decode([tokens[at - 1]]).endswith("."):
        at -= 1
    return at
