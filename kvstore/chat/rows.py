"""The rows of one conversation, and which tokens they are."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from kvstore import KVStore, Sequence
from kvstore.adapters.hf import StoreCache
from kvstore.budget import Budget
from kvstore.errors import UnsupportedModelError

OWNER = "chat"
"""Of all conversations' rows: `kvstore generate` must not find, and then take over, the rows of one."""


class ChatRows:
    """The sequence `chat-NAME` of a store. Rows count only as far as their tokens are known.

    `len(rows)` is the number of rows stored.
    """

    def __init__(self, store: KVStore, name: str, budget: Budget) -> None:
        self._store = store
        self._name = f"chat-{name}"
        self._budget = budget

    def __len__(self) -> int:
        return len(self._store[self._name]) if self._name in self._store else 0

    def agree(self, tokens: SequenceABC[int]) -> int:
        """Take back all rows from the first on that is not that of these tokens; return how many those were.

        Rows whose tokens nobody noted (the process was killed in the middle of an answer) are among them. Where no row
        stays, the sequence is made anew: its index must not come from a text that is gone.
        """
        n_rows = len(self)
        if not n_rows:
            return 0
        sequence = self._store[self._name]
        kept = common_prefix(sequence.tokens, tokens)
        if not kept:
            self.clear()
        elif kept < n_rows:
            sequence.truncate(kept)
        return n_rows - kept

    def cache(self, model: Any) -> StoreCache:
        """Return a cache that goes on from the rows; raises `UnsupportedModelError` for a model that cannot."""
        if self._name not in self._store:
            self._store.create(self._name, owner=OWNER)
        cache = StoreCache(model, store=self._store, name=self._name)
        if not cache.rows_suffice:
            raise UnsupportedModelError(
                "the model has layers with a sliding window or a state, which are not stored: it cannot go on from rows"
            )
        cache.set_budget(self._budget)
        return cache

    def note(self, tokens: SequenceABC[int]) -> None:
        """Say which tokens the rows are, from the first row on; more tokens than rows may be given."""
        sequence: Sequence = self._store[self._name]
        sequence.note_tokens(tokens[len(sequence.tokens) : len(sequence)])

    def clear(self) -> None:
        """Forget all rows."""
        if self._name in self._store:
            self._store.drop(self._name)


def common_prefix(a: SequenceABC[int] | np.ndarray[Any, Any], b: SequenceABC[int]) -> int:
    """Return how many first tokens are equal."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n
