"""Which attention answers when: the store, the model's own, or transformers' dense one."""

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore import IndexConfig
from kvstore.adapters.hf import StoreCache, cache_argument, use_store_attention
from kvstore.errors import ConfigError, SchemaMismatchError, UnsupportedModelError

pytestmark = pytest.mark.hf

SMALL = {"dense_rows": 0, "sinks": 2, "window": 4, "min_selected": 1, "index": IndexConfig("flat")}


@pytest.fixture
def model(tiny):
    return tiny("llama")


def attends(cache):
    """Queries that the store has answered, by method."""
    return dict(cache.store.counters.attends)


def test_a_small_budget_selects(model, prompt, generate):
    ids = prompt(60, 5, 0)
    expected = generate(model, None, ids)
    cache = StoreCache(model, budget=12, **SMALL)
    with use_store_attention(model):
        found = generate(model, cache, ids)
    assert torch.equal(found.logits[:, 0], expected.logits[:, 0])  # the prompt is attended densely
    assert not torch.allclose(found.logits[:, 1], expected.logits[:, 1], atol=1e-3)
    assert cache.get_seq_length() == 71
    answered = attends(cache)
    assert answered.get("flat") == sum(answered.values()) == 11 * 2 * 4  # tokens after the first, batch rows, layers


def test_long_prompts_are_indexed(tiny, prompt, generate):
    model, ids = tiny("smollm2"), prompt(700, 11, 0)
    expected = generate(model, None, ids)
    cache = StoreCache(model)  # settings as they come
    with use_store_attention(model):
        found = generate(model, cache, ids)
    assert torch.equal(found.logits[:, 0], expected.logits[:, 0])
    assert attends(cache)["index"] == 11 * 2 * 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_padded_batch_selects_what_each_prompt_selects_alone(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(60, 17, 0, 5)
    with use_store_attention(model):
        together = generate(model, StoreCache(model, budget=14, **SMALL), ids)
        for row, padding in enumerate((17, 0, 5)):
            alone = generate(model, StoreCache(model, budget=14, **SMALL), ids[row : row + 1, padding:])
            assert together.tokens[row, padding:].tolist() == alone.tokens[0].tolist()
            torch.testing.assert_close(together.logits[row], alone.logits[0], atol=1e-3, rtol=1e-3)


def test_budget_can_change_while_generating(model, prompt, generate):
    ids = prompt(60)
    cache = StoreCache(model, budget=12, **SMALL)
    with use_store_attention(model):
        first = generate(model, cache, ids)
        cache.set_budget(None)
        assert cache.budget is None
        dense = StoreCache(model, budget=None)
        ids = torch.cat([first.tokens, first.tokens[:, :3]], 1)
        before = attends(cache).get("dense", 0)
        generate(model, cache, ids)
        assert attends(cache)["dense"] == before + 44
        generate(model, dense, ids).assert_close(generate(model, None, ids))
    with pytest.raises(ConfigError):
        cache.set_budget(-1)


def test_without_store_attention_the_cache_is_a_plain_one(model, prompt, generate):
    ids = prompt(30, 4, 0)
    cache = StoreCache(model, budget=4, **SMALL)
    generate(model, cache, ids).assert_equal(generate(model, None, ids))
    assert sum(attends(cache).values()) == 0


@pytest.mark.parametrize("store_first", [False, True])
def test_attention_may_change_between_turns(model, prompt, generate, store_first):
    ids, cache = prompt(20), StoreCache(model, budget=None)
    for store in (store_first, not store_first, store_first):
        expected = generate(model, None, ids)
        if store:
            with use_store_attention(model):
                found = generate(model, cache, ids)
        else:
            found = generate(model, cache, ids)
        found.assert_close(expected)
        ids = torch.cat([found.tokens, prompt(5, seed=2)], 1)
    assert attends(cache).get("dense", 0) > 0


def test_a_configuration_that_is_not_the_models_does_not_matter(model, prompt, generate):
    import copy

    ids, cache = prompt(20), StoreCache(copy.deepcopy(model.config), budget=None)
    with use_store_attention(model):
        generate(model, cache, ids).assert_close(generate(model, None, ids))
    assert sum(attends(cache).values()) == 11 * 4


def test_other_caches_under_store_attention(model, prompt, generate):
    ids = prompt(30, 4, 0)
    expected = generate(model, None, ids)
    with use_store_attention(model):
        generate(model, None, ids).assert_equal(expected)


def test_masks_with_holes_are_computed_densely(model, prompt, generate):
    ids = prompt(30, 4, 0)
    mask = (ids > 0).long()
    mask[0, 10:14] = 0
    expected = generate(model, None, ids, attention_mask=mask)
    cache = StoreCache(model, budget=8, **SMALL)
    with use_store_attention(model):
        generate(model, cache, ids, attention_mask=mask).assert_equal(expected)
    assert sum(attends(cache).values()) == 0


@torch.no_grad()
def test_a_mask_that_changes_after_the_prompt(model, prompt):
    from transformers import DynamicCache

    argument, ids = cache_argument(model), prompt(30, 4, 0)
    mask = (ids > 0).long()
    masks = [mask[:, :27], mask[:, :28], torch.ones(2, 29).long(), None]  # padding that comes back into sight
    steps = [ids[:, :27], ids[:, 27:28], ids[:, 28:29], ids[:, 29:]]
    own, store = DynamicCache(config=model.config), StoreCache(model, budget=None)
    for step, seen in zip(steps, masks, strict=True):
        expected = model(step, attention_mask=seen, **{argument: own}).logits
        with use_store_attention(model):
            found = model(step, attention_mask=seen, **{argument: store}).logits
        torch.testing.assert_close(found[:, -1], expected[:, -1], atol=1e-4, rtol=1e-4)
    assert attends(store) == {"dense": 8} or sum(attends(store).values()) == 8  # one step of the three


@torch.no_grad()
def test_masks_of_four_dimensions(model, prompt):
    from transformers import DynamicCache

    argument, ids = cache_argument(model), prompt(21)
    own, store = DynamicCache(config=model.config), StoreCache(model, budget=None)
    triangle = torch.ones(21, 21).bool().tril()[None, None]
    for start, stop in ((0, 20), (20, 21)):
        mask = triangle[:, :, start:stop, :stop].clone()
        mask[..., 3] = torch.arange(start, stop) == 3  # a hole; a token sees at least itself
        expected = model(ids[:, start:stop], attention_mask=mask, **{argument: own}).logits
        with use_store_attention(model):
            found = model(ids[:, start:stop], attention_mask=mask, **{argument: store}).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_soft_caps_and_attention_sinks_are_computed_densely(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(30, 4, 0)
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected = generate(model, None, ids)
    model.set_attn_implementation(former)
    with use_store_attention(model):
        generate(model, StoreCache(model, budget=8, **SMALL), ids).assert_close(expected, 1e-3)


@pytest.mark.parametrize("family", ["diffllama", "doge"])
def test_models_that_use_keys_or_values_otherwise_are_computed_densely(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(30, 4, 0)
    try:
        cache = StoreCache(model, budget=8, **SMALL)
    except UnsupportedModelError as error:  # older versions do not call an attention function
        pytest.skip(f"no attention function in this transformers: {error}")
    with use_store_attention(model):
        expected = generate(model, None, ids)
        generate(model, cache, ids).assert_equal(expected)
    assert sum(attends(cache).values()) == 0


def test_another_batch_size_is_an_error(model, prompt, generate):
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        generate(model, cache, prompt(20))
        with pytest.raises(SchemaMismatchError, match="batch of 2"):
            model(prompt(3, 0, 0), **{cache_argument(model): cache})
        assert cache.get_seq_length() == 31


def test_gradients_do_not_reach_the_store(model, prompt):
    cache, argument = StoreCache(model, budget=None), cache_argument(model)
    with use_store_attention(model):
        model(prompt(20), **{argument: cache})
        logits = model(prompt(1), **{argument: cache}).logits
    assert logits.requires_grad
    keys, _ = cache.sequences[0].read(0)
    assert not keys.requires_grad


def test_closing_gives_the_memory_back(model, prompt, generate):
    cache = StoreCache(model)
    with use_store_attention(model):
        generate(model, cache, prompt(20))
    cache.close()
    assert len(cache.store) == 0


@pytest.mark.parametrize("padding", [(0,), (5, 0)])
def test_a_prompt_shows_its_queries_to_an_index_that_asks_for_them(tiny, prompt, generate, padding):
    model, ids = tiny("llama"), prompt(60, *padding)
    settings = SMALL | {"index": IndexConfig("pq", {"m": 1, "bits": 2, "weighting": "queries"}, min_rows=8)}
    cache = StoreCache(model, budget=0.5, **settings)
    with use_store_attention(model):
        generate(model, cache, ids)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for sequence, hidden in zip(cache.sequences, padding, strict=True):
        for keeper in sequence._indexes:
            assert keeper._queries._count == (60 - hidden) * group
            assert keeper.index.codebook.weighting is not None
