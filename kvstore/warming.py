"""Compiling ahead of the first prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch

from kvstore.config import COMMIT, StoreConfig
from kvstore.index.warming import MANY_ROWS
from kvstore.index.warming import warmup as warm_indexes
from kvstore.schema import Schema
from kvstore.sequence import Sequence
from kvstore.store import KVStore

_SHORT_ROWS = 64  # scanned exactly; kernels for many rows see MANY_ROWS
_BUDGET_ROWS = 16


def warmup(schema: Schema, config: StoreConfig | None = None) -> None:
    """Compile, or load from disk, every kernel that a store of this schema and these settings runs.

    A small store is filled and asked in every way, one layer for each way that keys are rotated. Takes up to a minute
    the first time on a machine, later a few seconds. Raises what the store would raise for the settings.
    """
    config = config or StoreConfig()
    ropes = tuple(dict.fromkeys(schema.rope or (None,)))
    small = replace(schema, n_layers=len(ropes), rope=ropes if schema.rope else ())
    kind = config.index.kind
    for rope in ropes:
        kinds = [("flat", {}), *([(kind, config.index.options)] if kind != "flat" else [])]
        warm_indexes(schema.n_kv_heads, schema.head_dim, schema.group, rope=rope, kinds=kinds)
    with KVStore(small, _small_config(config)) as store:
        numbers = count()
        for n_rows in (_SHORT_ROWS, MANY_ROWS + _SHORT_ROWS):
            sequence = store.create(f"of {n_rows}")
            _append(sequence, n_rows, next(numbers))
            twin = sequence.fork(f"beside {n_rows}")
            for seq in (sequence, twin):
                _append(seq, 1, next(numbers))
            for layer in range(small.n_layers):
                _ask(store, layer, sequence, twin)
            if kind != "flat" and n_rows > MANY_ROWS:
                sequence.reindex()


def _small_config(config: StoreConfig) -> StoreConfig:
    """The same kernels for few rows: nothing is dense by its length, and tables are indexed early."""
    index = replace(config.index, min_rows=MANY_ROWS // 2, append_rows=1, codebook_rows=MANY_ROWS // 2, iterations=None,
                    build=COMMIT)  # fmt: skip
    return replace(config, sinks=1, window=4, dense_rows=0, min_selected=1, heap_bytes=0, index=index)


def _append(sequence: Sequence, n_rows: int, seed: int) -> None:
    schema, generator = sequence._schema, torch.Generator().manual_seed(seed)
    with sequence.step():
        for layer in range(schema.n_layers):
            keys, values = (
                torch.randn(schema.n_kv_heads, n_rows, dim, generator=generator).to(schema.torch_dtype)
                for dim in (schema.head_dim, schema.value_dim)
            )
            sequence.append(layer, keys, values)


def _ask(store: KVStore, layer: int, sequence: Sequence, twin: Sequence) -> None:
    """Ask one layer of two sequences of the same rows all that can be asked."""
    s = store.schema
    q = torch.ones(2, s.n_q_heads, s.head_dim, dtype=s.torch_dtype)
    for sequences in ([sequence], [sequence, twin]):
        for budget in (None, _BUDGET_ROWS):
            for asked in (q, q.float()):  # queries may be float32 whatever the rows are
                store.attend(layer, sequences, asked[: len(sequences)], budget=budget)
    for queries in (q[0, 0], q[0, : s.group]):
        for exact in (False, True):
            store.topk(layer, 0, queries, 4, sequence=sequence, exact=exact)
            store.topk(layer, 0, queries, mass=0.9, sequence=sequence, exact=exact)
    store.range(layer, 0, q[0, 0], 1.0, sequence=sequence)
    store.explain(sequence, layer, q[0], analyze=True)
