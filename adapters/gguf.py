"""GGUF file to model directory: weights dequantized once, so that later loads take under a second."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from kvstore.adapters.gguf_tokenizer import read_tokenizer
from kvstore.adapters.model_source import ModelFileError
from kvstore.adapters.quiet import quiet_transformers, without_bars

FORMAT = 1  # goes into cache keys: raise it when convert writes something else from the same file


def convert(file: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write the model and tokenizer of a GGUF file into an empty directory, as transformers stores them.

    Raises `ModelFileError` when the file is broken or its architecture is unknown to transformers.
    """
    try:
        with quiet_transformers(), without_bars():
            read_tokenizer(file).save_pretrained(str(directory))
            _model(file, dtype).save_pretrained(str(directory))
    except OSError:  # a full disk, say: the caller knows where it was writing to
        raise
    except Exception as error:  # whatever a damaged file makes the parsers trip over
        raise ModelFileError(f"cannot load {file.name} as GGUF: {first_line(error)}") from error


def _model(file: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=dtype, local_files_only=True
    )
    config = copy.deepcopy(loaded.config)
    # a model marked as quantized refuses save_pretrained, although its weights are plain by now
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # no time and memory spent on random weights that are replaced at once
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    return plain


def first_line(error: Exception) -> str:
    """First line of an error's text, or its class when it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
