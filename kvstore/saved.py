"""What the directory of a store holds of one sequence."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvstore.storage.catalog import ExtentRef, IndexRef
from kvstore.storage.key import SEQUENCE_BYTES


@dataclass(slots=True)
class Saved:
    """Kept by each sequence of a durable store; says which rows and indexes need not be written again.

    Attributes:
        sequence: uuid that the sequence's records carry.
        n_rows: rows that a reopened store would show.
        valid_rows: rows in the extents that are still those of the sequence; a truncate lowers it.
        extents: the same for every layer.
        indexes: a reference a layer; None where there is none, or where it is no longer right.
        tokens: version of the tokens that were stored; -1: none.
        marks: what the index was when it was stored: (trainings done, rows covered) a layer.
    """

    sequence: bytes = field(default_factory=lambda: os.urandom(SEQUENCE_BYTES))
    n_rows: int = 0
    valid_rows: int = 0
    extents: tuple[ExtentRef, ...] = ()
    tokens: int = -1
    indexes: list[IndexRef | None] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)

    def truncate(self, n_rows: int) -> None:
        """Forget rows from n_rows on, and indexes that cover any of them."""
        self.valid_rows = min(self.valid_rows, n_rows)
        self.indexes = [ref if ref is not None and ref.stop_row <= n_rows else None for ref in self.indexes]

    def forget(self, n_extents: int, n_rows: int) -> None:
        """Know nothing any more but the first extents, of so many rows, which are certainly on the disk."""
        self.extents = self.extents[:n_extents]
        self.n_rows, self.valid_rows, self.tokens = 0, n_rows, -1
        self.indexes, self.marks = [], []

    def fork(self) -> Saved:
        """Return what is known of a sequence that begins with the same rows: their extents are shared."""
        return Saved(valid_rows=self.valid_rows, extents=self.extents, indexes=self.indexes[:], marks=self.marks[:])

    def sound_extents(self, block_tokens: int, n_blocks: int) -> tuple[ExtentRef, ...]:
        """The extents from the first row on that never need to be written again: whole, full, and still right."""
        kept = []
        for ref in self.extents:
            is_full = ref.n_blocks == n_blocks and ref.n_tokens == n_blocks * block_tokens
            if not is_full or (ref.number + n_blocks) * block_tokens > self.valid_rows:
                break
            kept.append(ref)
        return tuple(kept)
