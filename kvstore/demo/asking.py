"""Putting the demo's question, one token a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.demo.decoder import Decoder
from kvstore.demo.needle import ANSWER_TOKENS, Needle


@dataclass(frozen=True)
class Answer:
    """A greedy answer and its times.

    Attributes:
        tokens: the answer, without the token that ends it.
        question_s: seconds of the question's steps, the last of which gives the answer's first token.
        steps_s: seconds of all steps.
        n_steps: steps, one a token of the question and of the answer.
    """

    tokens: list[int]
    question_s: float
    steps_s: float
    n_steps: int


def ask(decoder: Decoder, needle: Needle, progress: Callable[[int, int], None]) -> Answer:
    """Put the question after what the decoder has read; `progress` is told steps done and steps at most."""
    n_at_most = len(needle.question) + ANSWER_TOKENS
    following = -1
    for token in needle.question:
        following = decoder.step(token)
        progress(len(decoder.step_s), n_at_most)
    question_s = sum(decoder.step_s)
    answer: list[int] = []
    while len(answer) < ANSWER_TOKENS and not decoder.is_end(following):
        answer.append(following)
        following = decoder.step(following)
        progress(len(decoder.step_s), n_at_most)
    progress(n_at_most, n_at_most)
    return Answer(answer, question_s, sum(decoder.step_s), len(decoder.step_s))
