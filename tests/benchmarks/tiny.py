"""A tiny model with random weights; in a module so that another process finds it by name."""


def tiny_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()
