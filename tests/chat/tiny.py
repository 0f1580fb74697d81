"""A tiny random model that talks in words, each of them one token: what it says can be read back as it was."""

from __future__ import annotations

from functools import cache

from kvstore import IndexConfig, StoreConfig
from kvstore.adapters.model_files import LoadedModel
from kvstore.chat.conversation import ChatSettings, Conversation, open_conversation
from tests.tiny_llama import tiny_llama

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "<system>", *(f"w{i}" for i in range(59))]
INDEX = IndexConfig("pq", {"m": 1, "bits": 4}, min_rows=16, append_rows=4)
SELECTIVE = StoreConfig(
    dense_rows=0, sinks=2, window=4, min_selected=1, budget=12, index=INDEX, spill_bytes=1 << 26, flush_rows=16
)
DENSE = StoreConfig(budget=None, index=INDEX, spill_bytes=1 << 26, flush_rows=1)
CONFIGS = {"dense": DENSE, "selective": SELECTIVE}
QUESTIONS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12", "w20 w21", "w30 w31 w32", "w40"]
SETTINGS = ChatSettings(max_new_tokens=12)


@cache
def loaded(template: str | None = TEMPLATE) -> LoadedModel:
    """The model, always the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = template
    return LoadedModel(tiny_llama(len(WORDS), positions=256, seed=1), tokenizer, "tiny")


def talk(path, config=DENSE, settings=SETTINGS, model=None):
    """Open the conversation in a directory."""
    return open_conversation(model or loaded(), path, config, settings)


def tokens_of(conversation: Conversation) -> list[int]:
    """Tokens of the rows, from the first on."""
    rows = conversation._rows
    return rows._store[rows._name].tokens.tolist() if len(rows) else []
