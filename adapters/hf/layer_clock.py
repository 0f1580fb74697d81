"""How long the model computes from one layer's keys to the next layer's."""

from __future__ import annotations

from statistics import median
from time import perf_counter


class LayerClock:
    """Times one forward pass: what passes between storing a layer's rows and having those of the next.

    That is the time in which a layer's clustering could hide. Layers that keep nothing in the store count for the one
    before them. The median over the layers is taken: the first one after a start may compile or load.
    """

    __slots__ = ("_gaps", "_running", "_stored_at")

    def __init__(self) -> None:
        self._running = False
        self._stored_at = 0.0
        self._gaps: list[float] = []

    def begin(self, wanted: bool) -> None:
        """Begin a pass; where it is not wanted nothing is timed."""
        self._running = wanted
        self._gaps.clear()

    def arrived(self, layer: int) -> None:
        """The rows of a layer of the store have been computed and are in host memory."""
        if self._running and layer > 0:
            self._gaps.append(perf_counter() - self._stored_at)

    def stored(self) -> None:
        """They are in the store."""
        if self._running:
            self._stored_at = perf_counter()

    def seconds(self) -> float | None:
        """Return the time of one layer, or None where none was measured; the pass has ended."""
        self._running = False
        return median(self._gaps) if self._gaps else None
