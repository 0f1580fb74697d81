"""The blocks of code in the guide run as they are printed."""

import re
from pathlib import Path

import pytest
import torch

import kvstore

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")  # the name that every version of theirs takes
def test_the_guide_runs_from_its_first_block_to_its_last(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the adapter needs the extra hf")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    ids = torch.arange(1, 40)[None]
    names = {"model": model, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
    for block in BLOCKS:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert len(BLOCKS) == 8
    assert len(names["hits"]) == 10


def test_every_error_that_the_guide_names_is_one():
    named = set(re.findall(r"`(\w+Error)`", GUIDE.read_text()))
    assert named >= {"HeapFullError", "SpillFullError"}
    assert all(issubclass(getattr(kvstore.errors, name.split(".")[-1]), kvstore.KVStoreError) for name in named)
