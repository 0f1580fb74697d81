"""A storage engine for the KV cache of transformer models."""
