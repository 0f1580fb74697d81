"""Telling a library that the user has not installed from a bug."""

from __future__ import annotations

OPTIONAL = ("typer", "rich", "transformers", "tokenizers", "gguf", "safetensors", "accelerate")
INSTALL = 'pip install "kvstore-engine[demo]"'


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return the line that tells the user what to install, or None when the module belongs to no extra."""
    name = (error.name or "").split(".")[0]
    return f"{name} is not installed; run: {INSTALL}" if name in OPTIONAL else None
