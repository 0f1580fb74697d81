"""A Llama of a few thousand random numbers, for whatever needs a model and not its words."""

from __future__ import annotations

from typing import Any


def tiny_llama(vocab_size: int, *, positions: int, seed: int) -> Any:
    """Return a model of two layers, four query and two KV heads; token 0 is padding, 1 ends a text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()
