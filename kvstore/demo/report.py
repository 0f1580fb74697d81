"""What a run of the demo found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvstore.budget import Budget

PROTOCOL = (
    "The context is attended to densely, once an engine. Question and answer then enter one token at a time, so that "
    "with the store already the question reads only the rows that the budget allows."
)


FULL, STORE = "full attention", "kvstore"


@dataclass(frozen=True)
class Outcome:
    """One engine's answer at one budget.

    Attributes:
        engine: `FULL` or `STORE`.
        budget: rows that a step may read, as a share or a number; None for all.
        answer: text that the model wrote after "The magic number is".
        right: whether that holds the hidden number.
        read_s: seconds for the context, building the index included; shared by all budgets of one store.
        first_token_s: seconds from the start to the answer's first token: read_s and the question's steps.
        tokens_per_s: steps of question and answer, one token each, in a second.
        rows_a_step: rows that one layer reads in one of those steps, mean.
        mass: share of the full softmax that these rows hold, mean over layers, heads and the steps measured.
    """

    engine: str
    budget: Budget
    answer: str
    right: bool
    read_s: float
    first_token_s: float
    tokens_per_s: float
    rows_a_step: float
    mass: float


@dataclass(frozen=True)
class DemoReport:
    """Everything that a run of the demo shows.

    Attributes:
        model, text: names of the model and of the text's source.
        n_context_tokens: tokens read densely; n_question_tokens: tokens of the question and the answer's first words.
        sentence, place: the hidden sentence and the token at which it begins.
        outcomes: full attention first, then one a budget.
        index_bytes_per_key, key_bytes: size of one head's key in the index (its code), and in the model.
        index_bytes, rows_bytes: of the whole index, codebooks included, and of all keys and values.
        explanation: `explain(analyze=True)` of one layer's query at the smallest budget.
    """

    model: str
    text: str
    n_context_tokens: int
    n_question_tokens: int
    sentence: str
    place: int
    outcomes: list[Outcome]
    index_bytes_per_key: float
    key_bytes: int
    index_bytes: int
    rows_bytes: int
    explanation: str
    protocol: str = PROTOCOL

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)
