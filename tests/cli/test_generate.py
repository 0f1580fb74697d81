"""`kvstore generate` against transformers' own generate, and what it refuses."""

import json

import pytest
import torch

from kvstore.errors import ConfigError

TEXT = "the text of a book that tells a number. " * 12


@pytest.fixture
def prompt(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    return file


def plain_text(model, tokenizer, prompt, n_new):
    tokens = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    out = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n_new, do_sample=False
    )
    return tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)


def test_all_rows_is_what_transformers_writes(run, model_dir, model, tokenizer, prompt):
    result = run("generate", "--model", model_dir, "--prompt-file", prompt, "--budget", "all", "--max-new-tokens", 24)
    assert result.exit_code == 0
    assert result.stdout == plain_text(model, tokenizer, TEXT, 24) + "\n"
    assert "24 tokens" in result.stderr
    assert "steps read 100.0% of the rows" in result.stderr


def test_json_holds_what_is_streamed(run, model_dir, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT * 6)  # beyond the length up to which the store attends densely
    arguments = ("generate", "--model", model_dir, "--prompt-file", prompt, "--budget", 0.25, "--max-new-tokens", 8)
    result = run(*arguments, "--json")
    found = json.loads(result.stdout)
    assert found["text"] + "\n" == run(*arguments).stdout
    assert found["n_new_tokens"] == 8
    assert found["budget"] == 0.25
    assert found["rows_share"] == pytest.approx(0.25, abs=0.01)


def test_chat_is_the_default_of_a_chat_model(run, chat_dir, model, tokenizer, prompt):
    arguments = ("generate", "--model", chat_dir, "--prompt-file", prompt, "--budget", "all", "--max-new-tokens", 12)
    chat = plain_text(model, tokenizer, f"<|user|>{TEXT}\n<|assistant|>", 12)
    raw = plain_text(model, tokenizer, TEXT, 12)
    assert chat != raw
    assert run(*arguments).stdout == chat + "\n"
    assert run(*arguments, "--chat").stdout == chat + "\n"
    assert run(*arguments, "--raw").stdout == raw + "\n"


def test_prompt_from_stdin(run, model_dir, model, tokenizer):
    arguments = ("generate", "--model", model_dir, "--prompt-file", "-", "--budget", "all", "--max-new-tokens", 5)
    result = run(*arguments, "--threads", 1, "--dtype", "float32", stdin=TEXT)
    assert result.stdout == plain_text(model, tokenizer, TEXT, 5) + "\n"


def test_one_token(run, model_dir, prompt):
    result = run("generate", "--model", model_dir, "--prompt-file", prompt, "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert "1 tokens" in result.stderr


@pytest.mark.parametrize("budget", ["0", "-0.5", "1.5", "0.0", "nan", "inf", "ten", ""])
def test_bad_budget(refused, model_dir, prompt, budget):
    assert "budget" in refused("generate", "--model", model_dir, "--prompt-file", prompt, f"--budget={budget}")


@pytest.mark.parametrize(("text", "budget"), [("0.1", 0.1), ("1.0", 1.0), ("1e-2", 0.01), ("512", 512), ("all", None)])
def test_parse_budget(text, budget):
    from kvstore.cli.options import parse_budget

    assert parse_budget(text) == budget
    assert type(parse_budget(text)) is type(budget)


def test_parse_budget_refuses_words():
    from kvstore.cli.options import parse_budget

    with pytest.raises(ConfigError, match="'half'"):
        parse_budget("half")


def test_bad_prompts(refused, model_dir, tmp_path):
    arguments = ("generate", "--model", model_dir, "--prompt-file")
    assert "No such file" in refused(*arguments, tmp_path / "absent.txt")
    assert "directory" in refused(*arguments, tmp_path)
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n")
    latin.write_bytes(b"caf\xe9")
    assert "is empty" in refused(*arguments, empty)
    assert "not UTF-8" in refused(*arguments, latin)
    assert "is empty" in refused(*arguments, "-", stdin="")


def test_too_long_a_prompt(refused, model_dir, tmp_path):
    prompt = tmp_path / "long.txt"
    prompt.write_text("x y " * 600)
    line = refused("generate", "--model", model_dir, "--prompt-file", prompt)
    assert "the 1024 that tiny was trained for" in line


def test_chat_without_template(refused, model_dir, prompt):
    assert "--raw" in refused("generate", "--model", model_dir, "--prompt-file", prompt, "--chat")


def test_bad_models(refused, prompt, tmp_path):
    arguments = ("generate", "--prompt-file", prompt, "--model")
    assert "no such file or directory" in refused(*arguments, tmp_path / "absent")
    assert "holds no config.json" in refused(*arguments, tmp_path)
    assert "no model" in refused(*arguments, prompt)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    assert "broken.gguf" in refused(*arguments, broken)


def test_unsupported_architecture(refused, prompt, transformers, tokenizer, tmp_path):
    config = transformers.BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "bloom" in refused("generate", "--model", tmp_path, "--prompt-file", prompt)


def test_usage_errors_exit_with_2(run, model_dir, prompt):
    assert run("generate").exit_code == 2
    assert run("generate", "--prompt-file", prompt, "--dtype", "int8").exit_code == 2
    assert run("generate", "--prompt-file", prompt, "--max-new-tokens", 0).exit_code == 2
    assert run("generate", "--prompt-file", prompt, "--threads", 0).exit_code == 2
    assert run("no-such-command").exit_code == 2


def test_what_a_store_has_is_not_read_again(run, model_dir, tmp_path):
    book = "the text of a book that tells a magic number, and then the other text. " * 8
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text(book + "what is it?")
    second.write_text(book + "and who wrote it?")
    common = ("generate", "--model", model_dir, "--raw", "--max-new-tokens", "4", "--budget", "all", "--json")
    store = ("--store", tmp_path / "book.kv")
    fresh = json.loads(run(*common, "--prompt-file", second).stdout)
    before = json.loads(run(*common, *store, "--prompt-file", first).stdout)
    after = json.loads(run(*common, *store, "--prompt-file", second).stdout)
    again = json.loads(run(*common, *store, "--prompt-file", second).stdout)
    assert before["n_stored_tokens"] == 0
    assert 0.8 * after["n_prompt_tokens"] < after["n_stored_tokens"] < after["n_prompt_tokens"]
    assert again["n_stored_tokens"] == again["n_prompt_tokens"] - 1
    assert after["text"] == again["text"] == fresh["text"]
    result = run(*common[:-1], *store, "--prompt-file", first)
    assert "of them stored before" in result.stderr
    shown = json.loads(run("inspect", tmp_path / "book.kv", "--json").stdout)
    assert len(shown["sequences"]) >= 2


def test_a_timeline_is_written(run, model_dir, prompt, tmp_path):
    file = tmp_path / "trace.json"
    arguments = ("generate", "--model", model_dir, "--prompt-file", prompt, "--max-new-tokens", 3, "--timeline")
    assert run(*arguments, file).exit_code == 0
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"step", "append", "commit", "attend"} <= names
    refused = run(*arguments, tmp_path / "no folder" / "trace.json")
    assert refused.exit_code == 2
    assert "no folder" in refused.stderr


def test_a_timeline_may_be_a_picture(run, model_dir, prompt, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    file = tmp_path / "trace.png"
    arguments = ("generate", "--model", model_dir, "--prompt-file", prompt, "--max-new-tokens", 3)
    assert run(*arguments, "--timeline", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
