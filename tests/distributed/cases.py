"""What the ranks and the test itself both compute: one model's rows, and what a store of some of them answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvstore import IndexConfig, KVStore, RopeSpec, Schema, StoreConfig
from tests.builders import append, flat_config, make_query, make_rows, pq_config

PROMPT, STEPS, K = 300, 40, 12
ROPE = tuple(None if layer == 1 else RopeSpec.from_theta(1e4 * (layer + 1), 16) for layer in range(5))
SCHEMA = Schema(n_layers=5, n_q_heads=8, n_kv_heads=4, head_dim=16, block_tokens=16, rope=ROPE, fingerprint="model")
CONFIGS = {
    "dense": flat_config(budget=None),
    "flat": flat_config(budget=0.2),
    "index": pq_config(budget=0.2),
    "rope index": flat_config(budget=0.2, index=IndexConfig("pq", {"bits": 5}, min_rows=24, append_rows=8)),
    "shared codebook": pq_config(budget=40, seed=3),
}
CONFIGS["shared codebook"] = dataclasses.replace(
    CONFIGS["shared codebook"],
    index=dataclasses.replace(CONFIGS["shared codebook"].index, codebook="model", codebook_rows=64),
)
Answers = dict[str, torch.Tensor]


def answers(schema: Schema, config: StoreConfig, heads: slice, layers: range) -> Answers:
    """Read a prompt, decode some tokens, and say what came out, for these KV heads and layers of SCHEMA.

    "out" float32 [n_layers, 1 + STEPS, n_q_heads, value_dim]; of the best rows of each KV head for its first query
    head "rows" int64 and "scores" float32 [n_layers, n_kv_heads, K].
    """
    with KVStore(schema, config) as store:
        seq = store.create("book")
        outs = []
        for step in range(1 + STEPS):
            rows = make_rows(SCHEMA, PROMPT if step == 0 else 1, seed=step)
            append(seq, [tuple(x[heads] for x in rows[layer]) for layer in layers])
            q = _queries(step, heads)
            outs.append(torch.stack([seq.attend(i, q[layer]) for i, layer in enumerate(layers)]))
        store._check()
        q = _queries(0, heads)
        hits = [
            [store.topk(i, head, q[layer, head * schema.group], k=K) for head in range(schema.n_kv_heads)]
            for i, layer in enumerate(layers)
        ]
    return {
        "out": torch.stack(outs, 1),
        "rows": _stacked(hits, "positions"),
        "scores": _stacked(hits, "scores"),
    }


def whole(config: StoreConfig) -> Answers:
    """What one store of everything answers."""
    return answers(SCHEMA, config, slice(0, SCHEMA.n_kv_heads), range(SCHEMA.n_layers))


def _queries(step: int, heads: slice) -> torch.Tensor:
    """Queries of a token at every layer of SCHEMA, [n_layers, n_q_heads of these KV heads, head_dim]."""
    group = SCHEMA.group
    q = torch.stack([make_query(SCHEMA, 100 * step + layer) for layer in range(SCHEMA.n_layers)])
    return q[:, heads.start * group : heads.stop * group]


def _stacked(hits: list[list[Any]], name: str) -> torch.Tensor:
    return torch.stack([torch.stack([torch.as_tensor(getattr(hit, name)) for hit in of_layer]) for of_layer in hits])
