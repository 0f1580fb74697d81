"""Creating, forking and dropping the sequences of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from weakref import finalize

from kvstore import KVStore, Sequence
from kvstore.budget import Budget
from kvstore.errors import SchemaMismatchError


class SequenceGroup:
    """The sequences of one batch, one a batch row. Groups forked from one another live in one store.

    A group that is no longer used leaves the names of its sequences behind, and the next group to make sequences in
    the store drops them: a garbage collector may run inside a call of the store, where dropping would not be safe.

    Attributes:
        store: where the sequences live.
        sequences: one a batch row, all of the same length; always the same list.
    """

    def __init__(self, store: KVStore, *, name: str | None = None, relative: SequenceGroup | None = None) -> None:
        self.store = store
        self.name = name  # of the only sequence, which stays when the group is no longer used
        self.sequences: list[Sequence] = []
        self._names: Iterator[int] = relative._names if relative else count()
        self._orphans: deque[str] = relative._orphans if relative else deque()
        if name is None:
            finalize(self, _leave_behind, self.sequences, self._orphans).atexit = False
        elif name in store:
            self.sequences.append(store[name])

    def create(self, n: int, budget: Budget) -> None:
        """Replace the sequences by n empty ones."""
        if self.name is not None and n != 1:
            raise SchemaMismatchError(f"{self.name!r} is one sequence, the model sent a batch of {n}; give no name")
        self.clear()
        for _ in range(n):
            sequence = self.store.create(self.name or self._new_name(), keep=self.name is not None)
            sequence.budget = budget
            self.sequences.append(sequence)

    def select(self, indices: list[int]) -> None:
        """Make sequence i what sequence indices[i] is; one that is wanted twice is forked, one not wanted dropped."""
        twins = SequenceGroup(self.store, relative=self)  # keeps an eye on the forks if one of them fails
        chosen: list[Sequence] = []
        kept: set[int] = set()
        for index in indices:
            sequence = self.sequences[index]
            chosen.append(twins.add_fork(sequence) if index in kept else sequence)
            kept.add(index)
        unwanted = [s.name for i, s in enumerate(self.sequences) if i not in kept]
        self.sequences[:] = chosen
        twins.sequences.clear()
        self._drop(unwanted)

    def fork(self) -> SequenceGroup:
        """Return a group of forks."""
        twin = SequenceGroup(self.store, relative=self)
        for sequence in self.sequences:
            twin.add_fork(sequence)
        return twin

    def add_fork(self, sequence: Sequence) -> Sequence:
        """Fork a sequence of a related group and put the fork at the end of this one."""
        fork = sequence.fork(self._new_name(), keep=False)
        self.sequences.append(fork)
        return fork

    def clear(self) -> None:
        """Drop all sequences."""
        names = [s.name for s in self.sequences]
        self.sequences.clear()
        self._drop(names)

    def _new_name(self) -> str:
        while self._orphans:
            self._drop([self._orphans.popleft()])
        return next(name for name in (f"row-{i}" for i in self._names) if name not in self.store)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.store:
                self.store.drop(name)


def _leave_behind(sequences: list[Sequence], orphans: deque[str]) -> None:
    orphans.extend(sequence.name for sequence in sequences)
