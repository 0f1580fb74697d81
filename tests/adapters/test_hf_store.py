"""Caches in a store that was given to them: shared, or in a directory and opened again."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore import IndexConfig, KVStore, StoreConfig
from kvstore.adapters.hf import StoreCache, cache_argument, open_store, schema_of, use_store_attention
from kvstore.errors import ConfigError, SchemaMismatchError, UnsupportedModelError

pytestmark = pytest.mark.hf

INDEX = IndexConfig("pq", {"m": 1, "bits": 4}, min_rows=16, append_rows=4)
CONFIG = StoreConfig(
    dense_rows=0, sinks=2, window=4, min_selected=1, budget=12, index=INDEX, spill_bytes=1 << 26, flush_rows=16
)


@pytest.fixture
def model(tiny):
    return tiny("llama")


def last_logits(model, cache, ids, start):
    with torch.inference_mode():
        return model(input_ids=ids[:, start:], **{cache_argument(model): cache}).logits[:, -1]


def decode(model, cache, ids, start):
    """Logits of every token from start on, one forward pass each."""
    return torch.stack([last_logits(model, cache, ids[:, : at + 1], at) for at in range(start, ids.shape[1])])


def test_a_conversation_goes_on_in_another_store_object_without_reading_again(model, prompt, tmp_path):
    ids = prompt(90)
    whole = StoreCache(model, config=CONFIG)
    with use_store_attention(model):
        last_logits(model, whole, ids[:, :60], 0)
        expected = decode(model, whole, ids, 60)
        with open_store(tmp_path / "s", model, CONFIG) as store:
            cache = StoreCache(model, store=store, name="book")
            last_logits(model, cache, ids[:, :60], 0)
            first = decode(model, cache, ids[:, :75], 60)
            cache.close()
            assert len(store["book"]) == 75
        with open_store(tmp_path / "s", model, CONFIG) as store:
            cache = StoreCache(model, store=store, name="book")
            assert cache.get_seq_length() == 75
            rest = decode(model, cache, ids, 75)
            assert cache.sequences[0] is store["book"]
            assert store.stats().index_builds == 0
    assert torch.equal(torch.cat([first, rest]), expected)


def test_generate_reads_only_what_is_not_stored(model, prompt, generate, tmp_path):
    ids = prompt(60)
    with use_store_attention(model), open_store(tmp_path / "s", model, CONFIG) as store:
        last_logits(model, StoreCache(model, store=store, name="book"), ids[:, :50], 0)
    with use_store_attention(model), open_store(tmp_path / "s", model, CONFIG) as store:
        cache = StoreCache(model, store=store, name="book")
        cache.set_budget(None)
        generate(model, cache, ids).assert_close(generate(model, None, ids))
        assert store.counters.steps == 12  # ten tokens of the prompt at once, then eleven
        assert len(cache.sequences[0]) == 71


def test_caches_share_a_store_and_leave_only_named_sequences(model, prompt, generate):
    ids = prompt(30)
    store = KVStore(schema_of(model, range(4)), CONFIG)
    with use_store_attention(model):
        named = StoreCache(model, store=store, name="kept")
        generate(model, named, ids)
        first, second = StoreCache(model, store=store), StoreCache(model, store=store)
        for cache in (first, second):
            generate(model, cache, prompt(20, 3, 0))
        assert len(store) == 5
        for cache in (named, first, second):
            cache.close()
        del named, first, second, cache
        generate(model, StoreCache(model, store=store), ids)
    assert "kept" in store
    assert len(store["kept"]) == 41
    store.close()


def test_only_a_named_cache_is_on_disk(model, prompt, generate, tmp_path):
    ids = prompt(40)
    with use_store_attention(model), open_store(tmp_path / "s", model, CONFIG) as store:
        generate(model, StoreCache(model, store=store), ids)
        named = StoreCache(model, store=store, name="kept")
        generate(model, named, ids)
    with open_store(tmp_path / "s", model, CONFIG) as store:
        assert list(store) == ["kept"]


def test_what_does_not_fit_is_named(model, tiny, prompt, generate, tmp_path):
    with open_store(tmp_path / "s", model, CONFIG) as store:
        with pytest.raises(ConfigError, match="has its settings"):
            StoreCache(model, store=store, budget=0.2)
        with pytest.raises(ConfigError, match="give the store too"):
            StoreCache(model, name="book")
        cache = StoreCache(model, store=store, name="book")
        with use_store_attention(model), pytest.raises(SchemaMismatchError, match="batch of 2"):
            generate(model, cache, prompt(20, 3, 0))
    other = KVStore(schema_of(tiny("llama", torch.bfloat16), range(4)), CONFIG)
    with pytest.raises(SchemaMismatchError, match="dtype is"):
        StoreCache(model, store=other)
    with pytest.raises(SchemaMismatchError):
        open_store(tmp_path / "s", tiny("llama", torch.bfloat16), CONFIG)


def test_a_model_with_sliding_layers_cannot_go_on_from_rows_alone(tiny, prompt, generate, tmp_path):
    model = tiny("gemma3")
    with use_store_attention(model), open_store(tmp_path / "s", model, CONFIG) as store:
        generate(model, StoreCache(model, store=store, name="book"), prompt(20))
        with pytest.raises(UnsupportedModelError, match="sliding window"):
            StoreCache(model, store=store, name="book")


def test_a_model_of_other_weights_does_not_go_on_from_foreign_rows(model, tiny, prompt, generate, tmp_path):
    with use_store_attention(model), open_store(tmp_path / "s", model, CONFIG) as store:
        generate(model, StoreCache(model, store=store, name="book"), prompt(20))
        tuned = copy.deepcopy(model)
        with torch.no_grad():
            tuned.model.layers[2].mlp.up_proj.weight.mul_(1.001)
        with pytest.raises(SchemaMismatchError, match="fingerprint is"):
            StoreCache(tuned, store=store, name="book")
        StoreCache(copy.deepcopy(model), store=store, name="book").close()
        StoreCache(model.config, store=store, name="book").close()  # which knows no weights
    with pytest.raises(SchemaMismatchError, match="fingerprint is"):
        open_store(tmp_path / "s", tuned, CONFIG)
    with open_store(tmp_path / "s", copy.deepcopy(model), CONFIG) as store:
        assert list(store) == ["book"]
