"""Which sequences of a store in a directory are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from kvstore.heap import Heap
    from kvstore.sequence import Sequence


SPILL_SHARE = 8
"""A full heap gives up an eighth of its blocks at a time, so that it is not full again at once."""


class Residency:
    """Makes room in a full heap: idle sequences are taken out of memory, those first that were used longest ago; when
    that is not enough, sequences in use give blocks up that are on the disk.

    Never taken out are sequences that are not kept on disk, those with an open step or with work in the background, and
    those of the call that is being answered. A handle of a sequence that was taken out brings it back when it is used.

    Attributes:
        unloaded: how many times a sequence was taken out. spilled: blocks given up.
    """

    def __init__(
        self,
        heap: Heap,
        loaded: dict[str, Sequence],
        unload: Callable[[Sequence], None],
        spill: Callable[[Sequence, int], int],
    ) -> None:
        """`loaded` are those in memory; `unload` saves one and takes it out; `spill` gives up blocks of one."""
        self._heap = heap
        self._loaded = loaded
        self._unload = unload
        self._spill = spill
        self._in_use: tuple[Sequence, ...] = ()
        self._handles: WeakValueDictionary[str, Sequence] = WeakValueDictionary()
        self.unloaded = self.spilled = 0
        heap.when_full = self.make_room

    def register(self, seq: Sequence) -> None:
        """Remember a handle, so that its sequence never has a second one."""
        self._handles[seq.name] = seq

    def handle(self, name: str) -> Sequence | None:
        """Return the handle of a sequence that somebody still holds."""
        return self._handles.get(name)

    def forget(self, name: str) -> None:
        """Forget the handle of a sequence that is dropped."""
        self._handles.pop(name, None)

    def use(self, sequences: Iterable[Sequence]) -> None:
        """Keep these in memory until the next call of this."""
        self._in_use = tuple(sequences)

    def is_used(self, seq: Sequence) -> bool:
        """Whether the call that is being answered needs this one."""
        return any(seq is other for other in self._in_use)

    def make_room(self, n_blocks: int) -> None:
        """Do all that can be done so that the heap can hand out n_blocks blocks."""
        self.unload_idle(n_blocks)
        for seq in sorted(self._loaded.values(), key=lambda seq: (_works(seq), seq._last_used)):
            if self._heap.has_room(n_blocks):
                return
            if not seq.stays:
                self.spilled += self._spill(seq, max(n_blocks, self._heap.used_blocks // SPILL_SHARE))

    def busy(self) -> list[Sequence]:
        """Return the sequences that could not be taken out now."""
        return [seq for seq in self._loaded.values() if self._is_busy(seq)]

    def unload_idle(self, n_blocks: int) -> None:
        """Take idle sequences out until the heap can hand out n_blocks blocks, or none is idle."""
        while not self._heap.has_room(n_blocks):
            idle = [seq for seq in self._loaded.values() if not self._is_busy(seq)]
            if not idle:
                return
            self.unload(min(idle, key=lambda seq: seq._last_used))

    def unload(self, seq: Sequence) -> None:
        """Take one out."""
        self._unload(seq)
        self.unloaded += 1

    def _is_busy(self, seq: Sequence) -> bool:
        if seq.step_open or _works(seq) or seq.stays:
            return True
        return len(seq) == 0 or not seq.keep or self.is_used(seq)


def _works(seq: Sequence) -> bool:
    """Whether work in the background reads the sequence's rows."""
    return any(keeper.working for keeper in seq._indexes)
