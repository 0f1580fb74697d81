"""`kvstore chat`: turns from the command line, from lines of stdin, and what it refuses."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.hf


def plain_answer(model, tokenizer, text, n_new):
    tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n_new, do_sample=False
    )
    return tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)


@pytest.fixture
def chat(run, chat_dir, tmp_path):
    """Run the command on one store; returns its result."""

    def invoke(*arguments, **more):
        common = ("--store", tmp_path / "talk.kv", "--max-new-tokens", 8, "--budget", "all")
        result = run("chat", chat_dir, *common, *arguments, **more)
        assert result.exit_code == 0, result.output
        return result

    return invoke


def test_one_turn_is_what_transformers_answers_and_the_next_one_goes_on(chat, model, tokenizer):
    first = chat("--once", "what is the text?")
    answer = plain_answer(model, tokenizer, "<|user|>what is the text?\n<|assistant|>", 8)
    assert first.stdout == answer + "\n"
    assert "rows stored" in first.stderr
    second = json.loads(chat("--once", "and the other?", "--json").stdout)
    written = f"<|user|>what is the text?\n<|assistant|>{answer}\n<|user|>and the other?\n<|assistant|>"
    assert second["text"] == plain_answer(model, tokenizer, written, 8)
    assert second["n_kept_rows"] > 0
    assert second["n_kept_rows"] + second["n_prefilled"] == len(tokenizer(written)["input_ids"])


def test_lines_of_stdin_are_turns_and_commands(chat):
    lines = "what is it?\n\n/undo\n/undo\n/dance now\n/stats\n/help\n  the text \n/reset\na book\n/quit\nnever said\n"
    result = chat("--json", stdin=lines)
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(turns) == 3
    notes = result.stderr
    for text in ("taken back: what is it?", "no turn to take back", "no command /dance", "0 turns, 0 rows", "/quit"):
        assert text in notes
    assert turns[2]["n_kept_rows"] == 0
    again = json.loads(chat("--once", "a book", "--json", "--name", "other").stdout)
    assert again["text"] == turns[2]["text"]


def test_settings_reach_the_conversation(chat):
    texts = [
        chat("--once", "it", "--temperature", 2, "--top-p", 0.9, "--seed", seed, "--name", name).stdout
        for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    ]
    assert texts[0] == texts[1] != texts[2]
    told = json.loads(chat("--once", "it", "--system", "a number", "--name", "told", "--json").stdout)
    plain = json.loads(chat("--once", "it", "--name", "plain", "--json").stdout)
    assert told["n_prefilled"] > plain["n_prefilled"]


def test_ctrl_c_ends_an_answer(chat, monkeypatch):
    from kvstore.cli import chat_loop

    class Pressing(chat_loop.TextStream):
        def put(self, tokens):
            super().put(tokens)
            if len(self.tokens) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    whole = chat("--once", "a book", "--name", "whole").stdout
    monkeypatch.setattr(chat_loop, "TextStream", Pressing)
    turn = json.loads(chat("--json", stdin="a book\n").stdout)
    assert (turn["stopped"], turn["n_new_tokens"]) == ("interrupted", 3)
    assert whole.startswith(turn["text"].rstrip("\ufffd"))


def test_what_is_refused(refused, chat_dir, tmp_path, chat):
    common = ("chat", chat_dir, "--store", tmp_path / "talk.kv", "--once", "it")
    assert "temperature" in refused(*common, "--temperature", -1)
    assert "1 to 64 letters" in refused(*common, "--name", "a/b")
    assert "trained for 1024" in refused(*common[:-1], "x y " * 600)
    assert "no such file" in refused("chat", tmp_path / "absent", "--store", tmp_path / "s", "--once", "it")
    assert "not UTF-8" in refused(*common[:-2], stdin=b"caf\xe9\n")
    chat("--once", "it")
    (tmp_path / "talk.kv" / "chat-chat.json").write_text("{")
    assert "remove it to begin the conversation anew" in refused(*common)


def test_a_model_without_a_template_continues_the_text(run, model_dir, tmp_path, model, tokenizer):
    result = run(
        "chat", model_dir, "--store", tmp_path / "s", "--once", "the text", "--budget", "all", "--max-new-tokens", 5
    )
    assert result.stdout == plain_answer(model, tokenizer, "the text\n", 5) + "\n"


def test_at_a_terminal_errors_end_a_turn_and_ctrl_d_leaves(chat_dir, tmp_path):
    ours, theirs = pty.openpty()
    command = ["-c", "from kvstore.cli import main; main()", "chat", chat_dir, "--store", tmp_path / "talk.kv"]
    command += ["--max-new-tokens", "4", "--budget", "all"]
    os.write(ours, ("x y " * 300).encode() + b"\n" * 2 + b"the book\n/stats\n\x04")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        stdin=theirs, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    for text in ("a new conversation", "rows stored", "MiB on disk"):
        assert text in done.stderr
