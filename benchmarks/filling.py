"""Caches filled to lengths that no forward pass has read: what steps cost there, not what they predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engines import DYNAMIC, Engine

if TYPE_CHECKING:
    import torch

ENGINES_AND_SPARE = 6
"""Rows that must find room, in multiples of those of one engine: there are four, and indexes, arenas and copies."""


@dataclass(frozen=True)
class Passage:
    """A text that a model has read.

    Attributes:
        layers: keys [1, n_kv_heads, n, head_dim] as attention uses them and values [1, n_kv_heads, n, value_dim] of
            each layer, floats.
        after: tokens that follow in the text, int64 [n_after].
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    after: torch.Tensor

    @property
    def n_rows(self) -> int:
        """Tokens that were read."""
        return self.layers[0][0].shape[2]

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return sum(x.element_size() * x.shape[1] * x.shape[3] for pair in self.layers for x in pair)

    def fits(self, n_rows: int) -> bool:
        """Whether memory has room for n_rows in every engine at once."""
        import psutil

        return ENGINES_AND_SPARE * n_rows * self.row_bytes <= int(psutil.virtual_memory().available)


def read_passage(model: Any, ids: torch.Tensor, n_tokens: int) -> Passage:
    """Read the first n_tokens of ids, int64 [> n_tokens], densely."""
    engine = Engine(DYNAMIC, model)
    engine.start(n_tokens)
    engine.forward(ids[:n_tokens])
    layers = tuple((layer.keys, layer.values) for layer in engine.cache.layers)
    engine.close()
    return Passage(layers, ids[n_tokens:])


def fill(engine: Engine, passage: Passage, n_rows: int, capacity: int) -> None:
    """Begin a cache of n_rows, with room for capacity: the passage's keys and values over and over.

    They go through the cache's own `update`, layer by layer, as those of a prompt do; the store's indexes are built
    over them and waited for. Keys keep the rotation that they were read with, and the tokens that follow have the
    positions after the passage: at positions that a model was not trained for float32 rounding grows until logits
    differ by nearly 1e-3 even between torch's own kernels, and no comparison would say anything.
    """
    import torch

    engine.start(capacity)
    with torch.no_grad():
        for number, pair in enumerate(passage.layers):
            keys, values = (_repeated(x, n_rows) for x in pair)
            engine.cache.update(keys, values, number)
    engine.position = passage.n_rows
    with engine.active():
        engine.forward(passage.after[:1])  # its commit needs the indexes
    engine.back(1)
    if int(engine.cache.get_seq_length()) != n_rows:
        raise RuntimeError(f"{engine.name} holds {engine.cache.get_seq_length()} rows where {n_rows} were filled in")


def _repeated(rows: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return [1, n_kv_heads, n_rows, dim]: rows [1, n_kv_heads, n, dim] from the first to the last, and again."""
    import torch

    return rows.index_select(2, torch.arange(n_rows, device=rows.device) % rows.shape[2])
