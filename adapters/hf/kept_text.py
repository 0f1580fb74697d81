"""Going on from what a store has read before, whatever sequence that was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore import KVStore
from kvstore.adapters.hf.cache import StoreCache


@dataclass
class KeptText:
    """A text that is being read into a store.

    Attributes:
        cache: holds the rows that were there already; the model reads the rest into it.
        n_stored: how many those were.
        tokens: of the whole text, to be set by whoever has had the model read and write it.
    """

    cache: StoreCache
    n_stored: int
    tokens: Sequence[int] = field(default_factory=list)


@contextmanager
def kept_text(model: Any, store: KVStore, prompt: Sequence[int], *, owner: str = "") -> Iterator[KeptText]:
    """Begin with the longest stored prefix of a prompt; afterwards the store knows the rows by their tokens.

    At least the prompt's last token is left to read. A sequence that the new one begins with, whole, is dropped after
    it. An exception leaves the store as it was.
    """
    name = next(text for text in (f"text-{i}" for i in count()) if text not in store)
    match = store.match_prefix(prompt[:-1], owner=owner)
    if match is None:
        store.create(name, owner=owner)
    else:
        store[match.name].fork(name, match.n_rows)
    cache = StoreCache(model, store=store, name=name)
    kept = KeptText(cache, match.n_rows if match is not None else 0)
    try:
        yield kept
    except BaseException:
        cache.close()
        store.drop(name)
        raise
    cache.close()
    sequence = store[name]
    sequence.note_tokens(kept.tokens[len(sequence.tokens) : len(sequence)])
    if match is not None and match.n_rows == len(store[match.name]):
        store.drop(match.name)
