"""The tokenizer inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a GGUF file as transformers has it.

    Files with SmolLM's rules are read here: transformers' conversion loses the rule that each digit is a token of
    its own, and with some versions the special tokens too. All others go through transformers.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    reader = GGUFReader(str(file))
    kind = (_value(reader, "model"), _value(reader, "pre"), bool(_value(reader, "add_bos_token")))
    if kind == ("gpt2", "smollm", False):
        return _smollm(reader)
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)


def _smollm(reader: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import PreTrainedTokenizerFast

    tokens = _value(reader, "tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "merges")]
    rules = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    rules.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    rules.decoder = decoders.ByteLevel()
    types = dict(zip(tokens, _value(reader, "token_type"), strict=True))
    whole = [AddedToken(token, normalized=False) for token, kind in types.items() if kind == USER_DEFINED]
    special = [AddedToken(token, normalized=False, special=True) for token, kind in types.items() if kind == CONTROL]
    rules.add_tokens(whole)
    rules.add_special_tokens(special)
    ids = {argument: _value(reader, f"{role}_token_id") for role, argument in ROLES.items()}
    roles = {argument: tokens[i] for argument, i in ids.items() if i is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, **roles)
    tokenizer.chat_template = _value(reader, "chat_template", prefix="tokenizer.")
    return tokenizer


def _value(reader: Any, name: str, prefix: str = "tokenizer.ggml.") -> Any:
    """Return what a field of the file holds, or None."""
    field = reader.get_field(prefix + name)
    return None if field is None else field.contents()
