"""After a warm-up a store compiles nothing any more, whatever it is asked."""

from typing import Any

import pytest

from tests.compiled import assert_compiles_nothing

STORE = """
import dataclasses, torch
from kvstore import IndexConfig, KVStore, RopeSpec, Schema, StoreConfig, warmup
rope = RopeSpec.from_theta(1e4, 16)
schema = Schema(4, 4, 2, 16, dtype={dtype!r}, value_dim={value_dim}, block_tokens=16, rope=(rope, None, rope, None))
index = IndexConfig({kind!r}, min_rows=100, append_rows=5, **{more})
config = StoreConfig(window=8, budget=60, dense_rows=32, index=index)
warmup(schema, config)
begin()
store = KVStore(schema, config)
def rows(n, dim):
    return torch.from_numpy(normal(2, n, dim)).to(schema.torch_dtype)
for n, name in ((20, "dense"), (90, "flat"), (2500, "index")):
    seq = store.create(name)
    for step in (n, 1, 1, 1, 1, 1, 1):
        with seq.step():
            for layer in range(4):
                seq.append(layer, rows(step, 16), rows(step, schema.value_dim))
        for layer in range(4):
            seq.attend(layer, rows(4, 16)[0])
    twin = seq.fork(name + " too")
    for layer in range(4):
        store.attend(layer, [seq, twin, store["dense"]], torch.from_numpy(normal(3, 4, 16)))
        for q in (torch.from_numpy(normal(16)), torch.from_numpy(normal(2, 16))):
            store.topk(layer, 1, q, 7, sequence=seq)
            store.topk(layer, 1, q, 7, sequence=seq, exact=True, reduce="max")
            store.topk(layer, 1, q, mass=0.5, sequence=seq, rows="middle" if n > 100 else "all")
        store.range(layer, 0, torch.from_numpy(normal(16)), 0.5, sequence=seq)
        seq.explain(layer, torch.from_numpy(normal(4, 16)), analyze=True)
    seq.truncate(n - 5)
    if seq._indexes[0].index is not None and {kind!r} != "flat":
        seq.reindex()
        seq.reindex(background=True)
        store.wait()
        seq.attend(0, torch.from_numpy(normal(4, 16)))
assert (store["index"]._indexes[0].index is None) == ({kind!r} == "flat")
"""


@pytest.mark.parametrize(
    ("kind", "dtype", "value_dim", "more"),
    [
        ("pq", "bfloat16", 16, {}),
        ("pq", "float32", 16, {"codebook": "auto", "codebook_rows": 300, "reindex_drift": 1.5}),
        ("sq8", "float16", 24, {}),
        pytest.param("pq", "float32", 16, {"options": {"space": "raw"}, "iterations": 3}, marks=pytest.mark.slow),
        pytest.param("sparq", "float32", 16, {}, marks=pytest.mark.slow),
        pytest.param("flat", "float32", 16, {}, marks=pytest.mark.slow),
    ],
)
def test_a_store_compiles_nothing_after_a_warmup(kind: str, dtype: str, value_dim: int, more: dict[str, Any]) -> None:
    assert_compiles_nothing(STORE.format(kind=kind, dtype=dtype, value_dim=value_dim, more=more))
