"""Which blocks a model's decoding reads: recorded once, replayed by whoever compares buffer pools.

python -m benchmarks.block_trace --out build/bench/blocks.npz
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from benchmarks import inputs
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]

_ARRAYS = ("layers", "offsets", "blocks", "counts")
_NUMBERS = ("n_layers", "n_blocks", "block_tokens")


class BlockTraceError(ValueError):
    """Raised for a file that holds no block trace, and for block sizes that a trace cannot be read in."""


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
        if len(self.offsets) != self.n_batches + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.blocks):
            raise BlockTraceError("offsets do not say where the batches begin and end")
        if len(self.counts) != len(self.blocks):
            raise BlockTraceError(f"{len(self.blocks)} blocks have {len(self.counts)} counts")

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

    def batches(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Give each batch: ids of blocks that no other layer has, int64 [n], and counts, int64 [n]."""
        for layer, start, stop in zip(self.layers, self.offsets, self.offsets[1:], strict=False):
            yield layer * self.n_blocks + self.blocks[start:stop], self.counts[start:stop]

    def steps(self) -> list[tuple[IntArray, IntArray]]:
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
        return _joined(np.zeros(len(chosen), np.int64), *parts, 1, self.n_blocks, self.block_tokens, self.model)

    def in_blocks_of(self, block_tokens: int) -> BlockTrace:
        """Return the same in larger blocks; raises `BlockTraceError` for what is no multiple of this one's."""
        if block_tokens % self.block_tokens:
            raise BlockTraceError(
                f"a trace in blocks of {self.block_tokens} cannot be read in blocks of {block_tokens}"
            )
        factor = block_tokens // self.block_tokens
        blocks, counts = [], []
        for start, stop in zip(self.offsets, self.offsets[1:], strict=False):
            larger, at = np.unique(self.blocks[start:stop] // factor, return_inverse=True)
            blocks.append(larger)
            counts.append(np.bincount(at, self.counts[start:stop], len(larger)).astype(np.int64))
        n_blocks = -(-self.n_blocks // factor)
        return _joined(self.layers, blocks, counts, self.n_layers, n_blocks, block_tokens, self.model)


def _joined(
    layers: IntArray,
    blocks: list[IntArray],
    counts: list[IntArray],
    n_layers: int,
    n_blocks: int,
    block_tokens: int,
    model: str,
) -> BlockTrace:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in blocks], dtype=np.int64)])
    none = [np.zeros(0, np.int64)]
    flat = (np.concatenate(blocks or none), np.concatenate(counts or none))
    return BlockTrace(layers, offsets, *flat, n_layers, n_blocks, block_tokens, model)


def write_block_trace(path: Path, trace: BlockTrace) -> None:
    """Write a trace as .npz, numbers only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(trace, name).astype(np.int32) for name in _ARRAYS}
    numbers = {name: np.array(getattr(trace, name)) for name in _NUMBERS}
    with path.open("wb") as file:  # savez would add a suffix to the name
        np.savez_compressed(file, model=np.array(trace.model), **arrays, **numbers)


def read_block_trace(path: Path) -> BlockTrace:
    """Return the trace in a file; raises `BlockTraceError` when it holds none."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name].astype(np.int64) for name in _ARRAYS}
            return BlockTrace(**arrays, **{name: int(found[name]) for name in _NUMBERS}, model=str(found["model"]))
    except (KeyError, ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BlockTraceError(
            f"{path} holds no block trace ({error}); record one with benchmarks.block_trace"
        ) from error


def record_block_trace(
    model: Any,
    ids: torch.Tensor,
    n_prompt: int,
    *,
    budget: float,
    block_tokens: int,
    name: str,
    tell: Tell,
    config: Any = None,
) -> BlockTrace:
    """Decode the tokens after a prompt, ids int64 [n_prompt + n_steps], and record the rows that are selected.

    Each step's queries are asked again for as many rows of the middle as the step's own plan selects.
    """
    from benchmarks.engines import StoreEngine
    from kvstore.adapters.queries import recorded_queries

    engine = StoreEngine(model, config)
    layers, blocks, counts = [], [], []
    try:
        engine.start(len(ids))
        with engine.active():
            tell(f"reading {n_prompt} tokens")
            engine.forward(ids[:n_prompt])
            engine.set_budget(budget)
            with recorded_queries(engine.cache) as queries:
                for step, token in enumerate(ids[n_prompt:]):
                    if step % 32 == 0:
                        tell(f"step {step} of {len(ids) - n_prompt}")
                    engine.forward(token[None])
                    for layer in sorted(queries):
                        rows = _selected(engine.cache, layer, queries[layer])
                        found, held = np.unique(rows // block_tokens, return_counts=True)
                        layers.append(layer)
                        blocks.append(found)
                        counts.append(held)
    finally:
        engine.close()
    n_blocks = -(-len(ids) // block_tokens)
    return _joined(np.array(layers, np.int64), blocks, counts, max(layers) + 1, n_blocks, block_tokens, name)


def _selected(cache: Any, layer: int, q: torch.Tensor) -> IntArray:
    """Rows selected for q [n_q_heads, head_dim], int64 [n], all KV heads one after another."""
    store, [sequence] = cache.store, cache.sequences
    k = store.explain(sequence, layer, q).plan.n_selected
    if k == 0:
        return np.zeros(0, np.int64)
    grouped = q.view(store.schema.n_kv_heads, store.schema.group, store.schema.head_dim)
    found = store.topk_heads(layer, grouped, k, sequence=sequence, rows="middle")
    rows: IntArray = found.positions.numpy().ravel()
    return rows


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="File to write.")],
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens in the end, prompt and decoded ones.")] = 8192,
    budget: Annotated[float, typer.Option(help="Share of the rows that a step reads.")] = 0.1,
    block_tokens: Annotated[int, typer.Option(min=1, help="Rows of a block; it can be read in larger ones.")] = 16,
    model: Annotated[str | None, typer.Option(help="Model directory or GGUF file (the demo's model).")] = None,
    text: Annotated[Path | None, typer.Option(exists=True, help="Text file (the demo's text).")] = None,
) -> None:
    """Record the blocks that decoding a text reads."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch
    from benchmarks.progress import Progress
    from kvstore.adapters.model_files import load_model

    with Progress() as tell:
        loaded = load_model(model, report=tell)
        ids = inputs.tokens_of(inputs.read_text(text), loaded.tokenizer)
        if len(ids) < tokens or steps >= tokens:
            raise typer.BadParameter(f"{steps} of {tokens} tokens cannot be decoded from a text of {len(ids)}")
        settings = {"budget": budget, "block_tokens": block_tokens, "name": loaded.name, "tell": tell}
        trace = record_block_trace(loaded.model, ids[:tokens], tokens - steps, **settings)
        write_block_trace(out, trace)
        tell(f"{trace.n_batches} batches of {len(trace.blocks) / trace.n_batches:.0f} blocks in {out}")


if __name__ == "__main__":
    app()
