"""The blocks that a model's decoding reads, from its tokens to a trace."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore import IndexConfig, StoreConfig
from kvstore.adapters.hf import StoreCache, cache_argument, use_store_attention
from kvstore.adapters.hf.block_trace import record_decoding
from kvstore.adapters.queries import recorded_queries
from kvstore.errors import InvalidQueryError, UnsupportedModelError

pytestmark = pytest.mark.hf

CONFIG = StoreConfig(sinks=2, window=16, dense_rows=32, min_selected=8, index=IndexConfig(min_rows=64))


@pytest.fixture
def model(tiny):
    return tiny("llama")


@pytest.fixture
def ids(prompt):
    return prompt(300, 0)[0].tolist()


@pytest.fixture
def trace(model, ids):
    return record_decoding(model, ids, 10, budget=0.3, block_tokens=8, config=CONFIG, name="tiny")


def test_a_trace_has_the_blocks_of_every_layer_and_step(trace):
    assert (trace.n_layers, trace.n_steps, trace.n_blocks, trace.block_tokens) == (4, 10, 38, 8)
    assert trace.layers.tolist() == [0, 1, 2, 3] * 10
    assert trace.model == "tiny"
    for number, (blocks, counts) in enumerate(trace.batches()):
        n_rows = 291 + number // 4
        assert (np.diff(blocks) > 0).all()
        assert counts.max() <= 2 * 8
        assert 0 < counts.sum() <= 2 * 0.3 * n_rows
        assert (blocks % trace.n_blocks).max() <= (n_rows - CONFIG.window) // 8
    assert trace.in_blocks_of(64).counts.sum() == trace.counts.sum()


def test_they_are_those_that_the_queries_ask_for(model, ids, trace):
    """The same tokens decoded again, the queries taken from the model, and explained."""
    wanted = []
    with use_store_attention(model), torch.inference_mode():
        cache = StoreCache(model, budget=None, config=CONFIG)
        model(torch.tensor([ids[:290]]), **{cache_argument(model): cache})
        cache.set_budget(0.3)
        with recorded_queries(cache) as queries:
            for token in ids[290:]:
                model(torch.tensor([[token]]), **{cache_argument(model): cache})
                for layer in range(4):
                    explained = cache.store.explain(cache.sequences[0], layer, queries[layer], analyze=True)
                    wanted.append(np.unique(explained.measured.chosen // 8).tolist())
        cache.close()
    found = [(ids % trace.n_blocks).tolist() for ids, _ in trace.batches()]
    same = [len(set(a) & set(b)) / max(len(a), len(b)) for a, b in zip(found, wanted, strict=True)]
    assert np.mean(same) > 0.95  # layers after the step's commit may have encoded a row more


def test_it_tells_how_far_it_is(model, ids):
    told = []
    record_decoding(model, ids[:80], 3, budget=40, config=CONFIG, tell=lambda *step: told.append(step))
    assert told == [("reading the prompt", 0, 0), *(("decoding", step, 3) for step in range(3))]


@pytest.mark.parametrize("n_steps", [0, -1, 300, 301])
def test_steps_out_of_range(model, ids, n_steps):
    with pytest.raises(InvalidQueryError, match="at least 1, and a prompt"):
        record_decoding(model, ids, n_steps, budget=0.3, config=CONFIG)


def test_a_model_without_full_attention_has_no_blocks(model, ids, monkeypatch):
    monkeypatch.setattr("kvstore.adapters.hf.cache.text_config", lambda model: windows_only(model.config))
    with pytest.raises(UnsupportedModelError, match="no layer"):
        record_decoding(model, ids, 10, budget=0.3, config=CONFIG)


def windows_only(config):
    config = type(config)(**config.to_dict())
    config.layer_types, config.sliding_window = ["sliding_attention"] * config.num_hidden_layers, 16
    return config
