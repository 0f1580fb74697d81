"""The model and the text that benchmarks run on."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def load_model_only(path: str | None = None) -> Any:
    """Return the model alone, in float32; None means the packaged one. Other processes find it by name."""
    from kvstore.adapters.model_files import load_model

    return load_model(path).model


def tokens_of(text: str, tokenizer: Any) -> torch.Tensor:
    """Return the tokens of a text, int64 [n], without special ones."""
    import torch

    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def read_text(path: Path | None) -> str:
    """Return the text of a file, or the English prose that the demo reads, or else that of Python's own help."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    folder = files("kvstore") / "demo" / "data"
    shipped = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    if shipped:
        return shipped[0].read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def places(ids: torch.Tensor, n_tokens: int, count: int) -> list[torch.Tensor]:
    """Return `count` stretches of n_tokens, evenly spaced from the beginning of ids to its end.

    They overlap where ids is short. Raises `ValueError` when it holds fewer than n_tokens.
    """
    room = len(ids) - n_tokens
    if room < 0:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than the {n_tokens} needed")
    starts = [0] if count == 1 else [room * i // (count - 1) for i in range(count)]
    return [ids[start : start + n_tokens] for start in starts]
