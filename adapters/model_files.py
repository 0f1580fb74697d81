"""Loading a model and its tokenizer from files on this machine; never asks the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore.adapters import gguf
from kvstore.adapters.checkpoints import CheckpointCache, cache_dir, digest
from kvstore.adapters.model_source import ModelFileError, ModelSource, find_model
from kvstore.adapters.quiet import quiet_transformers
from kvstore.schema import DTYPES


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of transformers, ready to run, and its tokenizer.

    Attributes:
        model, tokenizer: as transformers returns them.
        name: what to call the model in output.
    """

    model: Any
    tokenizer: Any
    name: str

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens with which the model ends its text."""
        return end_tokens(self.model)

    @property
    def context_tokens(self) -> int | None:
        """Tokens that the model was trained for, or None when its configuration does not say."""
        tokens = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(tokens) if tokens else None


def end_tokens(model: Any) -> frozenset[int]:
    """Return the tokens with which a model of transformers ends its text."""
    ends = model.generation_config.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def load_model(
    path: str | Path | None = None, dtype: str = "float32", report: Callable[[str], None] | None = None
) -> LoadedModel:
    """Load a model directory, a GGUF file, or (None) the packaged SmolLM2-135M-Instruct.

    Args:
        path: a directory with config.json, a .gguf file, or None.
        dtype: `"float32"`, `"float16"` or `"bfloat16"`; what the weights are computed with.
        report: called with a line of text as each slow stage begins.

    A GGUF file is converted at its first use and kept in the user's cache directory (`$KVSTORE_CACHE`).
    Raises `ModelFileError` when there is no model that can be loaded.
    """
    if dtype not in DTYPES:
        raise ModelFileError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    tell = report or (lambda _: None)
    source = find_model(path)
    directory = _converted(source, dtype, tell) if source.is_gguf else source.path
    tell(f"Loading {source.name}")
    return _load(directory, source.name, DTYPES[dtype])


def _converted(source: ModelSource, dtype: str, tell: Callable[[str], None]) -> Path:
    def make(directory: Path) -> None:
        tell(f"Converting {source.path.name} (once; about 20 s for a small model)")
        gguf.convert(source.path, directory, DTYPES[dtype])

    tell(f"Reading {source.path.name}")
    key = f"{source.path.stem}-{dtype}-{digest(source.path)}-v{gguf.FORMAT}"
    return CheckpointCache(cache_dir()).get(key, make)


def _load(directory: Path, name: str, dtype: torch.dtype) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True)
    except Exception as error:  # as many classes as there are ways for files to be broken
        raise ModelFileError(f"cannot load the model in {directory}: {gguf.first_line(error)}") from error
    return LoadedModel(model.eval(), tokenizer, name)
