"""Every way of generating gives what it gives with the model's own cache, when the budget covers every row."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore.adapters.hf import StoreCache, cache_argument, use_store_attention

pytestmark = pytest.mark.hf

CANNOT_CROP = "Cannot `crop` a `DynamicSlidingWindowLayer`"
"""How older versions refuse to take tokens back, as assisted decoding has to, once a sliding window is full."""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(tiny, request):
    return tiny(request.param)


@pytest.fixture
def agrees(generate):
    """Generate with both caches and compare."""

    def check(model, ids, seed=0, **options):
        torch.manual_seed(seed)
        try:
            expected = generate(model, None, ids, **options)
        except ValueError as error:
            if CANNOT_CROP not in str(error):
                raise
            pytest.skip(f"transformers fails with its own cache: {error}")
        torch.manual_seed(seed)
        with use_store_attention(model):
            found = generate(model, StoreCache(model, budget=None), ids, **options)
        assert found.tokens.tolist() == expected.tokens.tolist()
        return expected, found

    return check


def assert_same_tokens(found, expected, n_rows, n_prompt):
    """Equal, and something was generated."""
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert len(found.tokens) == n_rows
    assert found.tokens.shape[1] > n_prompt


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 17, 64, 200])
def test_prompt_lengths(agrees, model, prompt, n_tokens):
    expected, found = agrees(model, prompt(n_tokens))
    found.assert_close(expected)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 17, 64, 200])
def test_default_settings_are_dense_for_short_prompts(tiny, prompt, generate, n_tokens):
    model, ids = tiny("llama"), prompt(n_tokens)
    expected = generate(model, None, ids)
    with use_store_attention(model):
        generate(model, StoreCache(model), ids).assert_close(expected)


def test_chunked_prefill(agrees, model, prompt):
    expected, found = agrees(model, prompt(50), prefill_chunk_size=16)
    found.assert_close(expected)


def test_chunked_prefill_with_padding_longer_than_a_chunk(agrees, tiny, prompt):
    expected, found = agrees(tiny("llama"), prompt(50, 20, 0), prefill_chunk_size=16)
    found.assert_close(expected)


def test_sampling(agrees, model, prompt):
    expected, found = agrees(model, prompt(20), seed=1, do_sample=True, num_return_sequences=3, max_new_tokens=20)
    assert_same_tokens(found, expected, n_rows=3, n_prompt=20)


def test_beam_search(agrees, model, prompt):
    expected, found = agrees(model, prompt(20, 3, 0), num_beams=4, max_new_tokens=20)
    assert_same_tokens(found, expected, n_rows=2, n_prompt=20)


def test_beam_sampling(agrees, model, prompt):
    expected, found = agrees(
        model, prompt(20), seed=1, num_beams=3, do_sample=True, num_return_sequences=2, max_new_tokens=20
    )
    assert_same_tokens(found, expected, n_rows=2, n_prompt=20)


def test_prompt_lookup(agrees, model, prompt):
    ids = prompt(12).repeat(1, 3)
    expected, found = agrees(model, ids, prompt_lookup_num_tokens=4, max_new_tokens=30, eos_token_id=2)
    assert_same_tokens(found, expected, n_rows=1, n_prompt=36)


def test_assisted_generation(agrees, tiny, model, prompt):
    expected, found = agrees(model, prompt(20), assistant_model=tiny("smollm2"), max_new_tokens=30)
    assert_same_tokens(found, expected, n_rows=1, n_prompt=20)


def test_assisted_generation_with_a_perfect_assistant(agrees, model, prompt):
    expected, found = agrees(model, prompt(20), assistant_model=copy.deepcopy(model), max_new_tokens=30)
    assert_same_tokens(found, expected, n_rows=1, n_prompt=20)


def test_several_turns_with_one_cache(model, prompt, generate):
    ids = prompt(20)
    turn = prompt(9, seed=1)
    own, store = None, StoreCache(model, budget=None)
    for _ in range(3):
        expected = generate(model, None, ids)
        with use_store_attention(model):
            own = generate(model, store, ids)
        own.assert_close(expected)
        ids = torch.cat([own.tokens, turn], 1)
    assert store.get_seq_length() == ids.shape[1] - 10


@torch.no_grad()
def test_loop_over_the_model(model, prompt):
    """Tokens one by one, without attention_mask or position_ids."""
    from transformers import DynamicCache

    argument, ids = cache_argument(model), prompt(30)
    own, store = DynamicCache(config=model.config), StoreCache(model, budget=None)
    for step in (ids[:, :20], *ids[:, 20:].split(1, 1)):
        expected = model(step, **{argument: own}).logits
        with use_store_attention(model):
            found = model(step, **{argument: store}).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keep", [-10, 21])
def test_crop_then_go_on(tiny, prompt, generate, keep):
    """Both what crop means since transformers 5.15 (tokens to remove) and what it meant before (tokens to keep)."""
    model, ids = tiny("llama"), prompt(20)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        first = generate(model, cache, ids)
        cache.crop(0)
        assert cache.get_seq_length() == 31
        cache.crop(keep)
        assert cache.get_seq_length() == 21
        generate(model, cache, first.tokens[:, :26]).assert_close(generate(model, None, first.tokens[:, :26]))


def test_crop_of_a_hybrid_model(tiny, prompt, generate):
    model, ids = tiny("gemma3"), prompt(8)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        first = generate(model, cache, ids, max_new_tokens=5)
        cache.crop(-3)
        assert [cache.get_seq_length(layer) for layer in range(4)] == [9] * 4
        generate(model, cache, first.tokens[:, :11]).assert_close(generate(model, None, first.tokens[:, :11]))


def test_copies_of_a_prefix_go_on_by_themselves(model, prompt, generate):
    prefix = prompt(24)
    argument = cache_argument(model)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        model(prefix, **{argument: cache})  # with gradients, as users do
        for seed in (1, 2):
            ids = torch.cat([prefix, prompt(6, seed=seed)], 1)
            twin = copy.deepcopy(cache)
            generate(model, twin, ids).assert_close(generate(model, None, ids))
            assert twin.get_seq_length() == 41
        assert cache.get_seq_length() == 24
        generate(model, cache, ids).assert_close(generate(model, None, ids))


def test_copies_that_are_gone_leave_the_store(tiny, prompt, generate):
    model, ids = tiny("llama"), prompt(10, 0, 2)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        generate(model, cache, ids)
        for _ in range(5):
            copy.deepcopy(cache)
        assert len(cache.store) <= 4  # the batch, and the last copy


def test_batch_operations(tiny, prompt, generate, forward):
    model, ids = tiny("llama"), prompt(20, 4, 0, 9)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model), torch.no_grad():
        forward(model, cache, ids)
        cache.batch_repeat_interleave(2)
        assert [s.first_row for s in cache.sequences] == [4, 4, 0, 0, 9, 9]
        cache.batch_select_indices(torch.tensor([5, 0, 2, 2]))
        assert [s.first_row for s in cache.sequences] == [9, 4, 0, 0]
        cache.reorder_cache(torch.tensor([1, 0, 3]))
        wanted = torch.cat([ids[[0, 2, 1]], prompt(6, 0, 0, 0, seed=3)], 1)
        generate(model, cache, wanted).assert_close(generate(model, None, wanted))
        assert len(cache.store) == 3


def test_reset(model, prompt, generate):
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        generate(model, cache, prompt(20))
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = prompt(13, 2, 0, seed=5)
        generate(model, cache, ids).assert_close(generate(model, None, ids))
