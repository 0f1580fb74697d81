"""Adaptive iterations: the adapter tells the store how long a layer of the model takes."""

from itertools import count

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore import IndexConfig
from kvstore.adapters.hf import StoreCache, layer_clock, use_store_attention
from kvstore.index.cost_model import ClusteringCost

pytestmark = pytest.mark.hf


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by a second each time that somebody looks."""
    seconds = count()
    monkeypatch.setattr(layer_clock, "perf_counter", lambda: float(next(seconds)))
    return seconds


def new_cache(model, iterations="adaptive"):
    index = IndexConfig("pq", {"m": 1, "bits": 4}, min_rows=24, append_rows=8, iterations=iterations)
    cache = StoreCache(model, budget=24, dense_rows=0, sinks=2, window=4, min_selected=4, index=index)
    cache.store.iterations.clustering = ClusteringCost(0.0, 1e-3)  # fitted on the machine otherwise
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("own_attention", [False, True])
def test_a_prompt_is_timed_before_its_index_is_built(ticking, tiny, prompt, forward, family, own_attention):
    model, ids = tiny(family), prompt(100)
    cache = new_cache(model)
    if own_attention:  # the step commits when the rows are asked for
        forward(model, cache, ids)
    else:
        with use_store_attention(model):
            forward(model, cache, ids)
    store, sequence = cache.store, cache.sequences[0]
    assert store.iterations.compute.seconds(100) == pytest.approx(1.0)
    assert sequence._indexes[0].index.iterations == 10  # a second, for 94 rows of a millisecond each
    q = torch.ones(store.schema.n_q_heads, store.schema.head_dim)
    assert sequence.explain(0, q).index["iterations"] == "10 adaptive"


def test_a_batch_shares_the_time_and_decoding_is_not_timed(ticking, tiny, prompt, generate):
    model = tiny("llama")
    cache = new_cache(model)
    with use_store_attention(model):
        generate(model, cache, prompt(60, 5, 0, 0, 0))
    assert cache.store.iterations._fastest == {60: 0.25}


def test_three_prompt_lengths_make_a_model_of_the_cost(ticking, tiny, prompt, forward):
    model = tiny("llama")
    cache = new_cache(model)
    with use_store_attention(model):
        for n in (40, 80, 160):
            cache.reset()
            forward(model, cache, prompt(n))
    assert cache.store.iterations.compute.seconds(120) == pytest.approx(1.0, rel=0.01)  # each took one second


def test_a_pass_that_fails_midway_tells_nothing(ticking, tiny, prompt, forward):
    model, ids = tiny("llama"), prompt(60)
    cache = new_cache(model)

    def fail(*_):
        raise RuntimeError("midway")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with use_store_attention(model):
        with pytest.raises(RuntimeError, match="midway"):
            forward(model, cache, ids)
        handle.remove()
        assert len(cache.sequences[0]) == 0
        assert cache.store.iterations.compute is None
        forward(model, cache, ids)
    assert cache.store.iterations._fastest == {60: 1.0}


@pytest.mark.parametrize("iterations", [None, 3])
def test_nobody_looks_at_the_clock_where_nobody_asked(ticking, tiny, prompt, generate, iterations):
    model = tiny("llama")
    cache = new_cache(model, iterations)
    with use_store_attention(model):
        generate(model, cache, prompt(60))
    assert cache.store.iterations.compute is None
    assert next(ticking) == 0


def test_a_single_layer_cannot_be_timed(ticking, tiny, prompt, generate):
    model = tiny("one_layer")
    cache = new_cache(model)
    with use_store_attention(model):
        generate(model, cache, prompt(60))
    assert cache.store.iterations.compute is None
