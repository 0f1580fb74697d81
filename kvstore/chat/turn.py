"""One question and its answer, in figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

END, LENGTH, INTERRUPTED = "end", "length", "interrupted"


@dataclass(frozen=True)
class Turn:
    """What a turn said and what it took.

    Attributes:
        text: the answer.
        stopped: why it stopped: "end" (the model ended it), "length", or "interrupted".
        n_rows: rows stored after the turn. n_kept_rows: those that the turn began with and did not read again.
        n_prefilled: tokens that were read before the answer.
        n_forgotten: rows taken back because the conversation is written differently now, or was cut.
        n_new_tokens: tokens of the answer.
        first_token_s: seconds until the first of them. tokens_per_s: those after it; 0 for a single one.
    """

    text: str
    stopped: str
    n_rows: int
    n_kept_rows: int
    n_prefilled: int
    n_forgotten: int
    n_new_tokens: int
    first_token_s: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        again = f" ({self.n_forgotten:,} stored rows did not fit any more)" if self.n_forgotten else ""
        stopped = {END: "", LENGTH: "; stopped by --max-new-tokens", INTERRUPTED: "; interrupted"}[self.stopped]
        return (
            f"{self.n_rows:,} rows stored, {self.n_prefilled:,} prefilled{again}, {self.tokens_per_s:.1f} tokens/s, "
            f"first after {self.first_token_s:.2f} s{stopped}"
        )
