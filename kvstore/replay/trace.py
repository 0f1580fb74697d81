"""Which blocks a model's decoding reads: the format of a recorded trace."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError, StorageError

IntArray = npt.NDArray[np.int64]
Batch = tuple[IntArray, IntArray]
"""Ids of blocks that differ, int64 [n], and the rows wanted of each, int64 [n]."""

MAX_BLOCKS = 1 << 31
"""Of all layers; files hold numbers in 32 bits."""
NO_STOP = 1 << 62

_ARRAYS = ("layers", "offsets", "blocks", "counts")
_DAMAGE = (LookupError, ValueError, TypeError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)
_NUMBERS = ("n_layers", "n_blocks", "block_tokens")


class BlockTraceError(KVStoreError, ValueError):
    """Raised for a file that holds no block trace, for a trace that contradicts itself, and for what it cannot give."""


@dataclass(frozen=True)
class BlockTrace:
    """The blocks of every batch, which is one layer of one decode step, in the order of decoding.

    Attributes:
        layers: int64 [n_batches]. offsets: int64 [n_batches + 1]; batch i is blocks[offsets[i] : offsets[i + 1]].
        blocks: int64 [n], block numbers in the layer, ascending in a batch. counts: int64 [n], rows selected in each,
            all KV heads.
        n_layers, n_blocks: layers of the model, and blocks of one layer at the end. block_tokens: rows of a block.
        model: its name.
    """

    layers: IntArray
    offsets: IntArray
    blocks: IntArray
    counts: IntArray
    n_layers: int
    n_blocks: int
    block_tokens: int
    model: str

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.n_blocks, self.block_tokens)
        if min(sizes) < 1 or self.total_blocks > MAX_BLOCKS:
            raise BlockTraceError("{} layers of {} blocks of {} rows cannot be".format(*sizes))
        if any(getattr(self, name).ndim != 1 for name in _ARRAYS):
            raise BlockTraceError(f"{', '.join(_ARRAYS)} have one axis each")
        if len(self.counts) != len(self.blocks):
            raise BlockTraceError(f"{len(self.blocks)} blocks have {len(self.counts)} counts")
        self._check_batches()
        for name, values, least, stop in (
            ("layers", self.layers, 0, self.n_layers),
            ("blocks", self.blocks, 0, self.n_blocks),
            ("counts", self.counts, 1, NO_STOP),
        ):
            if len(values) and not least <= values.min() <= values.max() < stop:
                raise BlockTraceError(f"{name} are {values.min()} to {values.max()}, which cannot be")

    def _check_batches(self) -> None:
        if len(self.offsets) != self.n_batches + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.blocks):
            raise BlockTraceError("offsets do not say where the batches begin and end")
        if (np.diff(self.offsets) < 0).any():
            raise BlockTraceError("offsets go back")
        if self.n_batches % self.n_layers:
            raise BlockTraceError(f"{self.n_batches} batches are no whole steps of {self.n_layers} layers")
        falls = np.flatnonzero(np.diff(self.blocks) <= 0) + 1
        if not np.isin(falls, self.offsets).all():
            raise BlockTraceError("the blocks of a batch do not ascend")

    @classmethod
    def from_batches(
        cls, layers: npt.ArrayLike, blocks: Sequence[IntArray], counts: Sequence[IntArray], **sizes: Any
    ) -> BlockTrace:
        """Make a trace of the blocks and counts of each batch, int64 [n] both; sizes: n_layers, n_blocks and so on."""
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in blocks], dtype=np.int64)])
        none = [np.zeros(0, np.int64)]
        flat = (np.concatenate([*none, *blocks]), np.concatenate([*none, *counts]))
        return cls(np.asarray(layers, np.int64), offsets, *flat, **sizes)

    @property
    def n_batches(self) -> int:
        """Layers times steps."""
        return len(self.layers)

    @property
    def n_steps(self) -> int:
        """Decode steps."""
        return self.n_batches // self.n_layers

    @property
    def total_blocks(self) -> int:
        """Blocks of all layers."""
        return self.n_layers * self.n_blocks

    def batches(self) -> Iterator[Batch]:
        """Give each batch: ids of blocks that no other layer has, int64 [n], and counts, int64 [n]."""
        for layer, start, stop in zip(self.layers, self.offsets, self.offsets[1:], strict=False):
            yield layer * self.n_blocks + self.blocks[start:stop], self.counts[start:stop]

    def steps(self) -> list[Batch]:
        """Return the batches of each step as one."""
        batches, steps = list(self.batches()), []
        for start in range(0, len(batches), self.n_layers):
            ids, counts = zip(*batches[start : start + self.n_layers], strict=True)
            steps.append((np.concatenate(ids), np.concatenate(counts)))
        return steps

    def layer(self, number: int) -> BlockTrace:
        """Return the batches of one layer, as a trace of a model that has no other."""
        chosen = [i for i, layer in enumerate(self.layers) if layer == number]
        spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in chosen]
        parts = [[values[span] for span in spans] for values in (self.blocks, self.counts)]
        return self.from_batches(np.zeros(len(chosen)), *parts, **self._sizes(n_layers=1))

    def in_blocks_of(self, block_tokens: int) -> BlockTrace:
        """Return the same in larger blocks; raises `BlockTraceError` for what is no multiple of this one's."""
        if block_tokens < 1 or block_tokens % self.block_tokens:
            raise BlockTraceError(
                f"a trace in blocks of {self.block_tokens} cannot be read in blocks of {block_tokens}"
            )
        factor = block_tokens // self.block_tokens
        blocks, counts = [], []
        for start, stop in zip(self.offsets, self.offsets[1:], strict=False):
            larger, at = np.unique(self.blocks[start:stop] // factor, return_inverse=True)
            blocks.append(larger)
            counts.append(np.bincount(at, self.counts[start:stop], len(larger)).astype(np.int64))
        sizes = self._sizes(n_blocks=-(-self.n_blocks // factor), block_tokens=block_tokens)
        return self.from_batches(self.layers, blocks, counts, **sizes)

    def _sizes(self, **changes: int) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in (*_NUMBERS, "model")}, **changes}


def write_block_trace(path: Path, trace: BlockTrace) -> None:
    """Write a trace as .npz, numbers only; folders are made. Raises `StorageError`."""
    content: dict[str, Any] = {name: getattr(trace, name).astype(np.int32) for name in _ARRAYS}
    content |= {name: np.array(getattr(trace, name)) for name in (*_NUMBERS, "model")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # savez would add a suffix to the name
            np.savez_compressed(file, **content)
    except OSError as error:
        raise StorageError(error.errno or 0, f"cannot write {path}: {error.strerror}") from error


def read_block_trace(path: Path) -> BlockTrace:
    """Return the trace in a file; raises `BlockTraceError` when it cannot be read or holds none."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            content: dict[str, Any] = {name: found[name].astype(np.int64) for name in _ARRAYS}
            content |= {name: int(found[name]) for name in _NUMBERS}
            return BlockTrace(**content, model=str(found["model"]))
    except OSError as error:
        raise BlockTraceError(f"cannot read {path}: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise BlockTraceError(f"{path} holds no block trace ({error}); record one with kvstore trace") from error
