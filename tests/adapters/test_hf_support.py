"""What the adapter takes and what it refuses; what it changes in transformers, and when."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

import transformers

from kvstore.adapters.hf import StoreCache, register, schema_of, use_store_attention
from kvstore.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.hf

SIZES = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "falcon": LAYERS,
    "deepseek_v3": {**LAYERS, "kv_lora_rank": 8, "q_lora_rank": 8},
    "deepseek_v2": {**LAYERS, "kv_lora_rank": 8, "q_lora_rank": 8},
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_the_store_cannot_serve(model_type):
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **REFUSED[model_type])
    with pytest.raises(UnsupportedModelError, match=model_type):
        StoreCache(config)


def test_a_model_is_refused_like_its_configuration():
    config = transformers.AutoConfig.for_model("bloom", **SIZES, **REFUSED["bloom"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="bloom"):
        StoreCache(model)
    with pytest.raises(UnsupportedModelError, match="bloom"), use_store_attention(model):
        pass


def test_schema_of_a_model(tiny):
    schema = schema_of(tiny("qwen3", torch.bfloat16), [0, 1, 2])
    assert (schema.n_layers, schema.n_q_heads, schema.n_kv_heads) == (3, 8, 2)
    assert (schema.head_dim, schema.value_dim, schema.dtype) == (32, 32, "bfloat16")


def test_fingerprints_tell_configurations_apart(tiny):
    llama, again, other = (schema_of(tiny(name), [0]).fingerprint for name in ("llama", "llama", "llama3"))
    assert llama == again
    assert llama != other
    assert schema_of(tiny("llama").config, [0]).fingerprint == llama


def test_settings(tiny):
    from kvstore import StoreConfig

    cache = StoreCache(tiny("llama"), config=StoreConfig(sinks=7, window=9), window=11)
    assert (cache.store.config.sinks, cache.store.config.window) == (7, 11)
    assert cache.budget == StoreConfig().budget
    assert StoreCache(tiny("llama"), budget=0.25).budget == 0.25
    with pytest.raises(ConfigError, match="budget"):
        StoreCache(tiny("llama"), budget=-3)
    with pytest.raises(TypeError, match="windows"):
        StoreCache(tiny("llama"), windows=3)


def test_attention_is_restored(tiny):
    model = tiny("llama")
    former = model.config._attn_implementation
    for _ in range(2):
        with use_store_attention(model) as inside:
            assert inside is model
            assert model.config._attn_implementation == "kvstore"
        assert model.config._attn_implementation == former
    with pytest.raises(ZeroDivisionError), use_store_attention(model):
        1 / 0  # noqa: B018
    assert model.config._attn_implementation == former


def test_registering_twice_changes_nothing():
    register()
    functions = dict(transformers.AttentionInterface._global_mapping)
    register()
    assert functions == transformers.AttentionInterface._global_mapping


def test_importing_registers_nothing():
    code = (
        "import kvstore.adapters.hf, transformers;"
        "assert 'kvstore' not in transformers.AttentionInterface._global_mapping;"
        "assert 'kvstore' not in transformers.AttentionMaskInterface._global_mapping"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_cache_tells_transformers_what_it_is(tiny):
    cache = StoreCache(tiny("llama"))
    assert not cache.is_compileable
    assert len(cache) == 4
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert "StoreLayer(0)" in repr(cache)


def test_language_model_inside_another_model(prompt, generate):
    text = {**SIZES, **LAYERS, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 128}
    text |= {"layer_types": ["full_attention", "sliding_attention"], "initializer_range": 0.2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": 32, "patch_size": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    expected = generate(model, None, prompt(20))
    with use_store_attention(model):
        cache = StoreCache(model, budget=None)
        generate(model, cache, prompt(20)).assert_close(expected)
    assert cache.store_layers == {0: 0}
    assert cache.store.schema.rope[0] is not None
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"
