"""Stores filled with known rows, and what is in a store written down for comparison."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

import torch

from kvstore import IndexConfig, KVStore, Schema, Sequence, StoreConfig

Layers = list[tuple[torch.Tensor, torch.Tensor]]

SCHEMA = Schema(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=16, block_tokens=16)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def flat_config(**changes: Any) -> StoreConfig:
    """Small numbers, so that short sequences are already worth selecting from; no index."""
    settings = {"sinks": 2, "window": 8, "budget": 24, "min_selected": 8, "dense_rows": 32}
    return StoreConfig(**({**settings, "index": IndexConfig(kind="flat")} | changes))


def pq_config(
    min_rows: int = 24, append_rows: int = 8, over_fetch: float = 2.0, seed: int = 0, **changes: Any
) -> StoreConfig:
    """The same with an index from 24 middle rows on."""
    options = {"m": 2, "bits": 4}
    index = IndexConfig("pq", options, min_rows=min_rows, append_rows=append_rows, over_fetch=over_fetch, seed=seed)
    return flat_config(index=index, **changes)


def random(shape: SequenceABC[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_rows(schema: Schema, n: int, seed: int) -> Layers:
    """Keys and values of n tokens for every layer."""
    key_shape, value_shape = (schema.n_kv_heads, n, schema.head_dim), (schema.n_kv_heads, n, schema.value_dim)
    return [
        (
            random(key_shape, 1000 * seed + 2 * i, schema.torch_dtype),
            random(value_shape, 1000 * seed + 2 * i + 1, schema.torch_dtype),
        )
        for i in range(schema.n_layers)
    ]


def make_query(schema: Schema, seed: int, size: float = 2.0) -> torch.Tensor:
    """One token's queries [n_q_heads, head_dim]."""
    return size * random((schema.n_q_heads, schema.head_dim), 77_000 + seed)


def append(seq: Sequence, rows: Layers, positions: Any = None) -> None:
    """One step with these rows."""
    with seq.step():
        for layer, (keys, values) in enumerate(rows):
            seq.append(layer, keys, values, positions)


def cut(rows: Layers, start: int, stop: int) -> Layers:
    """Tokens [start, stop) of every layer."""
    return [(keys[:, start:stop], values[:, start:stop]) for keys, values in rows]


def fill(seq: Sequence, n: int, seed: int = 0) -> Layers:
    """Append n random tokens in one step and return them."""
    rows = make_rows(seq._schema, n, seed)
    append(seq, rows)
    return rows


def filled(schema: Schema, config: StoreConfig, n: int, seed: int = 0) -> tuple[KVStore, Sequence, Layers]:
    """A store with one sequence of n random tokens."""
    store = KVStore(schema, config)
    seq = store.create("book")
    return store, seq, fill(seq, n, seed)


def bits(x: torch.Tensor) -> list[int]:
    """The bit patterns of a tensor, so that NaN equals NaN and -0.0 differs from 0.0."""
    return x.contiguous().view(BITS[x.dtype]).flatten().tolist()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal in shape, type and every bit."""
    return x.shape == y.shape and x.dtype == y.dtype and bits(x) == bits(y)


def contents(store: KVStore) -> dict[str, Any]:
    """Everything a reader can see in a store, bit for bit, and its statistics but for its scratch memory."""
    sequences = {name: _sequence_contents(store[name]) for name in store}
    return {"sequences": sequences, "stats": store.stats().as_dict() | {"scratch_bytes": 0}}


def _sequence_contents(seq: Sequence) -> dict[str, Any]:
    layers = range(seq._schema.n_layers)
    return {
        "rows": len(seq),
        "of layers": [seq.n_rows(layer) for layer in layers],
        "bits": [[bits(x) for x in seq.read(layer)] for layer in layers],
        "positions": seq.positions(0, len(seq)).tolist(),
        "step open": seq.step_open,
        "due": seq._next_layer,
        "budget": seq.budget,
        "first row": seq.first_row,
        "covered": [keeper.covered for keeper in seq._indexes],
    }
