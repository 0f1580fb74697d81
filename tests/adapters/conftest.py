"""Tiny models with random weights, and one way to generate with them."""

from functools import cache
from typing import NamedTuple

import pytest
import torch

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide enough for attention that is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOWED = {"head_dim": 16, "sliding_window": 16, "layer_types": HYBRID}
SHARED = {  # the last two layers use keys and values of the first two
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": None,
    "intermediate_size": [96] * 4,
}

# name -> (model type, what differs from SIZES)
FAMILIES = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3_text", WINDOWED | {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "head_dim": 8, "sliding_window": None}),
    "smollm2": (
        "llama",
        {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "one_layer": ("llama", {"num_hidden_layers": 1}),
    "cohere": ("cohere", {}),
    "exaone4": ("exaone4", WINDOWED),
    "gemma2": ("gemma2", WINDOWED | {"query_pre_attn_scalar": 16}),
    "gpt_oss": ("gpt_oss", WINDOWED | {"num_local_experts": 4}),
    "gpt2": ("gpt2", {"num_key_value_heads": 8}),
    "diffllama": ("diffllama", {}),
    "doge": ("doge", {}),
    "gemma3n": ("gemma3n_text", SHARED | {"sliding_window": 16, "layer_types": HYBRID}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
}


@cache
def _model(family, dtype=torch.float32):
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, differences = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**SIZES, **differences})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Generated(NamedTuple):
    """Tokens int64 [batch, n_prompt + n_new] and float logits [batch, n_new, vocab]."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def assert_close(self, other, tolerance=1e-4):
        assert self.tokens.tolist() == other.tokens.tolist()
        torch.testing.assert_close(self.logits, other.logits, atol=tolerance, rtol=tolerance)

    def assert_equal(self, other):
        assert self.tokens.tolist() == other.tokens.tolist()
        assert torch.equal(self.logits, other.logits)


@pytest.fixture(scope="session")
def tiny():
    """Return `tiny(family, dtype=float32)`, which gives a model; do not change it."""
    return _model


@pytest.fixture(scope="session")
def prompt():
    """Return `prompt(n_tokens, padding...)`: ids int64 [batch, n_tokens], a row for each count of left padding."""

    def make(n_tokens, *padding, seed=0):
        generator = torch.Generator().manual_seed(seed)
        padding = padding or (0,)
        ids = torch.randint(3, SIZES["vocab_size"], (len(padding), n_tokens), generator=generator)
        for row, n in enumerate(padding):
            ids[row, :n] = SIZES["pad_token_id"]
        return ids

    return make


@pytest.fixture(scope="session")
def generate():
    """Return `generate(model, cache, ids, **options)`: greedy, 12 tokens; without a cache, with transformers' own."""
    from transformers import DynamicCache

    from kvstore.adapters.hf import cache_argument

    def run(model, cache, ids, **options):
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
        options[cache_argument(model)] = DynamicCache(config=model.config) if cache is None else cache
        mask = options.pop("attention_mask", (ids != SIZES["pad_token_id"]).long())
        found = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
        return Generated(found.sequences, torch.stack(found.logits, 1))

    return run


@pytest.fixture(scope="session")
def forward():
    """Return `forward(model, cache, ids, start=0)`: one pass over ids from start on, with mask and positions of all."""
    from kvstore.adapters.hf import cache_argument

    def run(model, cache, ids, start=0):
        mask = (ids != SIZES["pad_token_id"]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        return model(
            ids[:, start:], attention_mask=mask, position_ids=positions, **{cache_argument(model): cache}
        ).logits

    return run
