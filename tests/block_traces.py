"""Block traces that no model has made."""

import numpy as np

from kvstore.replay.trace import BlockTrace

N_LAYERS, N_BLOCKS = 3, 16


def make_trace(n_steps=20, seed=0):
    """Steps of three layers; in each, block b holds about as many rows as it says, and a few come and go."""
    random = np.random.default_rng(seed)
    blocks, counts = [], []
    for _ in range(n_steps * N_LAYERS):
        found = np.flatnonzero(random.random(N_BLOCKS) < 0.8)
        blocks.append(found)
        counts.append(found + 1 + random.integers(0, 3, len(found)))
    return trace_of(blocks, counts, N_LAYERS, N_BLOCKS, model="made up")


def trace_of(blocks, counts=None, n_layers=1, n_blocks=N_BLOCKS, block_tokens=4, model=""):
    """A trace of these blocks, a list a batch, each with these rows or with one."""
    counts = [[1] * len(part) for part in blocks] if counts is None else counts
    parts = [[np.array(part, np.int64) for part in values] for values in (blocks, counts)]
    layers = np.tile(np.arange(n_layers), len(blocks) // n_layers)
    sizes = {"n_layers": n_layers, "n_blocks": n_blocks, "block_tokens": block_tokens, "model": model}
    return BlockTrace.from_batches(layers, *parts, **sizes)


def batch(ids, counts=None):
    """Blocks and their rows, one each if left out."""
    return np.array(ids, np.int64), np.array(counts or [1] * len(ids), np.int64)
