"""The keys in the store, turned back by the schema's RopeSpec, are what the model's key projection gave."""

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore.adapters.hf import StoreCache, cache_argument, schema_of, use_store_attention
from kvstore.adapters.hf.rope import rotated_keys

pytestmark = pytest.mark.hf

ROTATED = ["llama", "llama3", "yarn", "mistral", "qwen2", "qwen3", "phi3", "smollm2", "gemma3", "cohere"]


def rotation_input(attention, family):
    """Return a list that receives the layer's keys before RoPE, and the hook that fills it."""
    seen = []
    if family == "phi3":
        width = attention.num_key_value_heads * attention.head_dim
        return seen, attention.qkv_proj.register_forward_hook(
            lambda module, args, out: seen.append(out[..., -2 * width : -width])
        )
    source = getattr(attention, "k_norm", None) or attention.k_proj
    return seen, source.register_forward_hook(lambda module, args, out: seen.append(out))


@torch.no_grad()
@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize("family", ROTATED)
def test_unrotated_keys_are_the_models_projections(tiny, prompt, family, from_config):
    model = tiny(family)
    cache = StoreCache(model.config if from_config else model, budget=None)
    attention = {number: model.model.layers[number].self_attn for number in cache.store_layers}
    seen = {number: rotation_input(module, family) for number, module in attention.items()}
    with use_store_attention(model):
        model(prompt(50), **{cache_argument(model): cache})
    for _, hook in seen.values():
        hook.remove()
    for number, layer in cache.store_layers.items():
        keys, _ = cache.sequences[0].read(layer)
        spec = cache.store.schema.rope[layer]
        plain = rotated_keys(keys, torch.arange(50), spec, inverse=True)
        (expected,), _ = seen[number]
        expected = expected.reshape(50, -1, keys.shape[-1]) if expected.shape[1] == 50 else expected[0].transpose(0, 1)
        torch.testing.assert_close(plain.transpose(0, 1), expected, atol=1e-4, rtol=1e-4)


def test_layouts(tiny):
    assert schema_of(tiny("llama"), [0]).rope[0].layout == "half"
    assert schema_of(tiny("cohere"), [0]).rope[0].layout == "interleaved"
    assert schema_of(tiny("yarn"), [0]).rope[0].attention_factor > 1


def test_each_layer_type_has_its_own_angles(tiny):
    schema = schema_of(tiny("gemma3"), [0, 1])
    assert schema.rope[0] != schema.rope[1]


@pytest.mark.parametrize("family", ["longrope", "gpt2"])
def test_angles_that_depend_on_the_length_or_do_not_exist_are_not_known(tiny, family):
    assert schema_of(tiny(family), [0, 1]).rope == (None, None)
    assert schema_of(tiny(family).config, [0, 1]).rope == (None, None)


def test_full_layers_without_rope(tiny):
    schema = schema_of(tiny("exaone4"), [0, 1])
    assert schema.rope[0] is not None
    assert schema.rope[1] is None


def test_partial_rotation(tiny):
    schema = schema_of(tiny("phi3"), [0])
    assert schema.rope[0].rotary_dim == schema.head_dim // 2


@torch.no_grad()
def test_positions_below_zero_in_the_padding(tiny, prompt):
    model, ids = tiny("llama"), prompt(20, 6, 0)
    cache, mask = StoreCache(model, budget=None), (ids > 0).long()
    with use_store_attention(model):
        model(ids, attention_mask=mask, position_ids=mask.cumsum(1) - 1, **{cache_argument(model): cache})
    assert cache.sequences[0].positions(6).tolist() == list(range(14))


@torch.no_grad()
def test_positions_of_padded_rows(tiny, prompt, forward):
    """Row r of a row with p rows of padding has the position r - p, said or not said by the model."""
    model, ids = tiny("llama"), prompt(20, 6, 0)
    cache = StoreCache(model, budget=None)
    with use_store_attention(model):
        forward(model, cache, ids[:, :19])
        forward(model, cache, ids, 19)
    padded, full = (sequence.positions(6, 20).tolist() for sequence in cache.sequences)
    assert padded == list(range(14))
    assert full == list(range(6, 20))
