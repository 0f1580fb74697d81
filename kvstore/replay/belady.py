"""What a pool could find at best, given the whole future: bounds for replacement policies, and no policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.replay.trace import Batch, IntArray

NEVER = np.iinfo(np.int64).max


class Belady:
    """Belady's MIN for a trace of batches: keep what is used again soonest; a block may also be let by.

    No pool that loads a block when it misses it, and no sooner, finds more blocks, whatever it keeps and lets in. Rows
    found are another matter: MIN does not know that some blocks hold many. `most_rows` bounds those.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self._next_uses = _next_uses([ids for ids, _ in batches])

    def run(self, n_frames: int) -> tuple[IntArray, IntArray]:
        """Return the blocks and the rows found in each batch, int64 [n_batches] both. O(n_batches * n_frames)."""
        held = np.zeros(0, np.int64)  # when each block in the pool is used next; which block it is does not matter
        blocks, rows = (np.zeros(len(self._batches), np.int64) for _ in range(2))
        known: IntArray = np.zeros(0, np.int64)
        for at, ((ids, counts), next_uses) in enumerate(zip(self._batches, self._next_uses, strict=True)):
            found = np.isin(ids, known[held == at])
            blocks[at], rows[at] = np.count_nonzero(found), counts[found].sum()
            stay = held != at
            known, held = np.concatenate([known[stay], ids]), np.concatenate([held[stay], next_uses])
            best = held.argsort(kind="stable")[:n_frames]
            known, held = known[best], held[best]
        return blocks, rows


def most_rows(steps: Sequence[Batch], n_frames: int) -> int:
    """Return a bound on the rows found by any pool that loads a block when it misses it, and no sooner.

    A step must use each block once at most. Then what a step finds was in the pool when the step began, together, so it
    is never more than the n_frames blocks of that step that hold most, and none of them is new.
    """
    seen: IntArray = np.zeros(0, np.int64)
    rows = 0
    for ids, counts in steps:
        known = counts[np.isin(ids, seen)]
        rows += int(np.sort(known)[::-1][:n_frames].sum())
        seen = np.union1d(seen, ids)
    return rows


def _next_uses(batches: Sequence[IntArray]) -> list[IntArray]:
    """For each block of each batch, the next batch that has it, or `NEVER`."""
    upcoming: dict[int, int] = {}
    found: list[IntArray] = []
    for at in reversed(range(len(batches))):
        ids = batches[at].tolist()
        found.append(np.array([upcoming.get(block, NEVER) for block in ids], np.int64))
        upcoming.update(dict.fromkeys(ids, at))
    return found[::-1]
