"""Finding a stored sequence that begins with given tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.tokens import Tokens

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Match:
    """A sequence whose first n_rows rows are those of the tokens asked for."""

    name: str
    n_rows: int


class Prefixes:
    """The tokens of sequences by the hashes of their blocks, each hash over all blocks before it.

    Owner and model are hashed first, so that what one owner has stored is never found by another. A match is compared
    token by token besides: two texts with one hash would not be mixed up.
    """

    def __init__(self, fingerprint: str, block_tokens: int) -> None:
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._names: dict[bytes, dict[str, None]] = {}  # hash -> sequences, in the order they came
        self._known: dict[str, tuple[IntArray, list[bytes]]] = {}
        self._seen: dict[str, tuple[Tokens, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def update(self, name: str, tokens: Tokens, owner: str | None) -> None:
        """Learn a sequence's tokens unless they are known as they are; without an owner nobody may find them."""
        if self._seen.get(name) != (tokens, tokens.version):
            self.put(name, tokens.ids if owner is not None else tokens.ids[:0], owner or "")
            self._seen[name] = tokens, tokens.version

    def put(self, name: str, tokens: IntArray, owner: str) -> None:
        """Make tokens, int64 [n], those of a sequence, in place of what was known of it. O(n)."""
        self.remove(name)
        hashes = self._hashes(tokens, owner)
        self._known[name] = tokens, hashes
        for key in hashes:
            self._names.setdefault(key, {})[name] = None

    def remove(self, name: str) -> None:
        """Forget a sequence."""
        self._seen.pop(name, None)
        _, hashes = self._known.pop(name, (None, []))
        for key in hashes:
            del self._names[key][name]
            if not self._names[key]:
                del self._names[key]

    def find(self, tokens: IntArray, owner: str) -> Match | None:
        """Return the sequence with the most first tokens in common, at least a block; the oldest of equals. O(n)."""
        best: Match | None = None
        for key in reversed(self._hashes(tokens, owner)):
            for name in self._names.get(key, ()):
                n_rows = _common(self._known[name][0], tokens)
                if n_rows >= self._block_tokens and (best is None or n_rows > best.n_rows):
                    best = Match(name, n_rows)
            if best is not None:
                return best
        return None

    def _hashes(self, tokens: IntArray, owner: str) -> list[bytes]:
        """One hash a whole block."""
        key = hashlib.blake2b(repr((self._fingerprint, owner)).encode(), digest_size=16).digest()
        found, size = [], self._block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            block = np.ascontiguousarray(tokens[start : start + size], "<i8").tobytes()
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            found.append(key)
        return found

    def _check(self) -> None:
        """Assert that the hashes are those of the tokens known."""
        listed = {(key, name) for key, names in self._names.items() for name in names}
        assert listed == {(key, name) for name, (_, hashes) in self._known.items() for key in hashes}
        assert all(self._names.values())


def _common(a: IntArray, b: IntArray) -> int:
    """How many first tokens are equal."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
