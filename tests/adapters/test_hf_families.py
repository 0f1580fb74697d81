"""A budget that covers every row gives what the model gives with its own cache, family by family."""

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore.adapters.hf import StoreCache, use_store_attention
from kvstore.errors import UnsupportedModelError

pytestmark = pytest.mark.hf

FULL = ["llama", "llama3", "yarn", "longrope", "mistral", "qwen2", "qwen3", "phi3", "smollm2", "one_layer", "gpt2"]
HYBRID = ["gemma3", "exaone4"]
FAMILIES = [*FULL, *HYBRID, "mistral_window", "cohere", "gemma3n"]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_and_logits(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(40)
    expected = generate(model, None, ids)
    with use_store_attention(model):
        generate(model, StoreCache(model, budget=None), ids).assert_close(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(30, 7, 0)
    expected = generate(model, None, ids)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        generate(model, cache, ids).assert_close(expected)
    assert [s.first_row for s in cache.sequences] == ([7, 0] if cache.store else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_dense_is_exact(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(30, 7, 0)
    expected = generate(model, None, ids)
    with use_store_attention(model):
        generate(model, StoreCache(model, budget=None, exact_dense=True), ids).assert_equal(expected)


def test_layers_with_a_state_beside_full_attention(tiny, prompt, generate):
    model, ids = tiny("lfm2"), prompt(30, 7, 0)
    try:
        cache = StoreCache(model, budget=None)
    except UnsupportedModelError as error:  # older versions gave this model a cache of its own
        pytest.skip(f"a cache of its own in this transformers: {error}")
    assert cache.store_layers == {1: 0, 3: 1}
    with use_store_attention(model):
        generate(model, cache, ids).assert_close(generate(model, None, ids))


@pytest.mark.parametrize("family", FULL)
def test_made_from_a_configuration(tiny, prompt, generate, family):
    model, ids = tiny(family), prompt(20)
    expected = generate(model, None, ids)
    with use_store_attention(model):
        generate(model, StoreCache(model.config, budget=None), ids).assert_close(expected)


@pytest.mark.parametrize("family", HYBRID)
def test_only_full_attention_layers_are_in_the_store(tiny, family):
    cache = StoreCache(tiny(family))
    assert cache.store_layers == {1: 0, 3: 1}
    assert cache.store.schema.n_layers == 2
    assert cache.is_sliding == [True, False, True, False]


def test_model_without_full_attention_has_no_store(tiny, prompt, generate):
    model = tiny("mistral_window")
    cache = StoreCache(model, budget=0.1)
    assert cache.store is None
    assert cache.sequences == []
    assert cache.budget is None
    cache.set_budget(8)
    generate(model, cache, prompt(20))
    assert cache.get_seq_length() == 31
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tiny, prompt, generate, dtype):
    model, ids = tiny("llama", dtype), prompt(40, 5, 0)
    expected = generate(model, None, ids)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        found = generate(model, cache, ids)
    assert cache.store.schema.torch_dtype == dtype
    first = (expected.logits[:, 1] - found.logits[:, 1]).abs().max()
    assert first <= 2**-4 * expected.logits.abs().max()  # a few units in the last place of bfloat16
    with use_store_attention(model):
        generate(model, StoreCache(model, budget=None, exact_dense=True), ids).assert_equal(expected)
