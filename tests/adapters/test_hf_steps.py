"""A forward pass is one step: all layers or none."""

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore import KVStore, Sequence
from kvstore.adapters.hf import StoreCache, cache_argument, use_store_attention
from kvstore.errors import StepError

pytestmark = pytest.mark.hf


class StoppedError(Exception):
    pass


@pytest.fixture
def model(tiny):
    return tiny("llama")


def interrupt(*_):
    raise StoppedError


def stop_in(layer):
    """Raise before the layer's own attention has appended."""
    return layer.register_forward_pre_hook(interrupt)


def rows(cache):
    return [[sequence.n_rows(layer) for layer in range(4)] for sequence in cache.sequences]


@pytest.mark.parametrize("at_layer", [1, 2, 3])
@pytest.mark.parametrize("n_prompt", [0, 20])
def test_a_forward_pass_that_stops_midway_leaves_nothing(model, prompt, generate, forward, at_layer, n_prompt):
    cache = StoreCache(model, budget=None)
    ids = prompt(30, 3, 0)
    with use_store_attention(model):
        if n_prompt:
            forward(model, cache, ids[:, :n_prompt])
        handle = stop_in(model.model.layers[at_layer])
        with pytest.raises(StoppedError):
            generate(model, cache, ids)
        handle.remove()
        assert cache.get_seq_length() == n_prompt
        assert {len(sequence) for sequence in cache.sequences} == {n_prompt}
        generate(model, cache, ids).assert_close(generate(model, None, ids))
    assert rows(cache) == [[41] * 4] * 2


def test_stopping_while_decoding(model, prompt, generate):
    ids, cache = prompt(20), StoreCache(model, budget=None)
    with use_store_attention(model):
        first = generate(model, cache, ids)
        handle = stop_in(model.model.layers[2])
        with pytest.raises(StoppedError):
            generate(model, cache, first.tokens)
        handle.remove()
        generate(model, cache, first.tokens).assert_close(generate(model, None, first.tokens))


def test_another_batch_may_follow_a_first_pass_that_stopped(model, prompt, generate):
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        handle = stop_in(model.model.layers[1])
        with pytest.raises(StoppedError):
            generate(model, cache, prompt(20))
        handle.remove()
        ids = prompt(20, 0, 3, 5)
        generate(model, cache, ids).assert_close(generate(model, None, ids))
    assert len(cache.store) == 3


def test_a_hybrid_model_says_that_it_cannot_go_on(tiny, prompt, generate):
    """Its sliding layers belong to transformers and keep what they have taken."""
    model, cache = tiny("gemma3"), StoreCache(tiny("gemma3"), budget=None)
    with use_store_attention(model):
        handle = stop_in(model.model.layers[2])
        with pytest.raises(StoppedError):
            generate(model, cache, prompt(20))
        handle.remove()
        with pytest.raises(StepError, match="reset"):
            generate(model, cache, prompt(20))
        cache.reset()
        generate(model, cache, prompt(20)).assert_close(generate(model, None, prompt(20)))


def test_a_commit_that_fails_leaves_sequences_of_one_length(model, prompt, generate, monkeypatch):
    ids, cache = prompt(20, 0, 2), StoreCache(model, budget=None)
    commit = Sequence.commit_step
    with use_store_attention(model):
        generate(model, cache, ids)
        monkeypatch.setattr(Sequence, "commit_step", lambda s: commit(s) if s.name == "row-0" else interrupt())
        with pytest.raises(StoppedError):
            model(ids[:, :1], **{cache_argument(model): cache})
        monkeypatch.undo()
        assert rows(cache) == [[31] * 4] * 2


def test_one_query_call_a_layer(model, prompt, monkeypatch):
    calls, attend = [], KVStore.attend
    monkeypatch.setattr(KVStore, "attend", lambda *args, **options: calls.append(args[1]) or attend(*args, **options))
    cache, argument = StoreCache(model, budget=None), cache_argument(model)
    with use_store_attention(model), torch.no_grad():
        model(prompt(20, 0, 3, 5), **{argument: cache})
        model(prompt(1, 0, 0, 0), **{argument: cache})
    assert calls == [0, 1, 2, 3]
