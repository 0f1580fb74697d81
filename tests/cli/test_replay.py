"""Recording a trace and replaying it, from the command line."""

import json

import numpy as np
import pytest

from kvstore.buffer_pool import policy_names
from kvstore.replay.trace import read_block_trace, write_block_trace
from tests.block_traces import make_trace

TEXT = "the text of a book that tells a magic number, and then the other text. " * 70


@pytest.fixture
def file(tmp_path):
    write_block_trace(tmp_path / "blocks.npz", make_trace())
    return tmp_path / "blocks.npz"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def words(result):
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


@pytest.mark.hf
def test_a_model_is_traced_and_replayed(run, model_dir, text, tmp_path):
    out = tmp_path / "tiny.npz"
    arguments = ("--model", model_dir, "--text", text, "--tokens", 600, "--steps", 20, "--budget", 150)
    said = words(run("trace", *arguments, "--block-tokens", 16, "--out", out))
    assert "20 steps of 2 layers" in said
    trace = read_block_trace(out)
    assert (trace.n_layers, trace.n_steps, trace.n_blocks, trace.model) == (2, 20, 38, "tiny")
    most = 2 * (150 - 4 - 64)  # of two KV heads: the budget less sinks and window
    assert all(0 < counts.sum() <= most for _, counts in trace.batches())
    found = json.loads(run("replay", out, "--sizes", "25,100", "--json", "-").stdout)
    assert [one["n_frames"] for one in found["sizes"]] == [19, 76]
    for one in found["sizes"]:
        assert len(one["policies"]) == len(policy_names())
        assert all(0 < each["hits"] <= one["belady"]["hits"] for each in one["policies"])


@pytest.mark.hf
def test_what_cannot_be_traced_is_refused_in_one_line(refused, model_dir, text, tmp_path):
    start = ("trace", "--model", model_dir, "--out", tmp_path / "x.npz", "--text")
    assert "fewer than 100000" in refused(*start, text, "--tokens", 100_000)
    assert "300 of 300 tokens cannot be decoded" in refused(*start, text, "--tokens", 300, "--steps", 300)
    assert "a budget is" in refused(*start, text, "--budget", "much")
    assert "cannot read" in refused(*start, tmp_path / "no.txt")
    assert "there is no directory" in refused("trace", "--out", tmp_path / "no" / "x.npz")
    assert not (tmp_path / "x.npz").exists()


def test_a_table_shows_every_policy_beside_belady(run, file):
    result = run("replay", file)
    said = words(result)
    assert "made up: 20 steps" in said
    assert "of 48 blocks of 4 rows" in said
    for percent in ("5 %", "10 %", "20 %"):
        assert f"│ {percent} │" in said
    for name in ("Belady", *policy_names()):
        assert said.count(name) >= 3, name


def test_policies_and_sizes_can_be_chosen(run, file):
    result = run(
        "replay", file, "--policy", "lru", "--policy", "arc", "--sizes", " 50%, 12.5", "--admit", 2, "--json", "-"
    )
    found = json.loads(result.stdout)
    assert set(found) == {"model", "n_layers", "n_steps", "n_blocks", "block_tokens", "blocks_a_step", "sizes"}
    assert [(one["share"], one["n_frames"]) for one in found["sizes"]] == [(0.5, 24), (0.125, 6)]
    for one in found["sizes"]:
        assert set(one) == {"share", "n_frames", "belady", "policies"}
        assert set(one["belady"]) == {"hits", "hit_rate"}
        assert [each["policy"] for each in one["policies"]] == ["lru", "arc"]
        for each in one["policies"]:
            assert set(each) == {
                "policy", "n_frames", "admit_blocks", "lookups", "hits", "rows", "rows_found", "loaded", "hit_rate",
                "row_rate", "of_belady",
            }  # fmt: skip
            assert each["admit_blocks"] == 2
            assert each["hit_rate"] <= one["belady"]["hit_rate"]


def test_blocks_can_be_joined(run, file):
    found = json.loads(run("replay", file, "--block-tokens", 8, "--policy", "lru", "--json", "-").stdout)
    assert (found["block_tokens"], found["n_blocks"]) == (8, 8)


def test_json_in_a_file_goes_with_the_table(run, file, tmp_path):
    said = words(run("replay", file, "--json", tmp_path / "out.json"))
    assert "Belady" in said
    assert len(json.loads((tmp_path / "out.json").read_text())["sizes"]) == 3


def test_a_picture(run, refused, file, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert "Belady" in words(run("replay", file, "--plot", tmp_path / "pool.png"))
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")
    result = run("replay", file, "--policy", "lru", "--plot", tmp_path / "pool.text")
    assert result.exit_code == 2
    assert "cannot draw" in result.stderr


def test_without_matplotlib_nothing_is_replayed(refused, file, tmp_path, monkeypatch):
    import importlib.util

    right = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "matplotlib" else right(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert 'pip install "kvstore-engine[plot]"' in refused("replay", file, "--plot", tmp_path / "p.png")


@pytest.mark.parametrize("sizes", ["0", "101", "-5", "nan", "5,,10", "many"])
def test_sizes_out_of_range(refused, file, sizes):
    line = refused("replay", file, f"--sizes={sizes}")
    assert "percentages" in line or "up to 100 %" in line


def test_what_cannot_be_replayed_is_refused_in_one_line(refused, file, tmp_path):
    assert "No such file" in refused("replay", tmp_path / "none.npz")
    assert "Is a directory" in refused("replay", tmp_path)
    (tmp_path / "text").write_text("no trace")
    assert "holds no block trace" in refused("replay", tmp_path / "text")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    assert "record one with kvstore trace" in refused("replay", tmp_path / "other.npz")
    assert "'best'; known are arc, clock, lfu, lru, score-decay" in refused("replay", file, "--policy", "best")
    assert "cannot be read in blocks of 6" in refused("replay", file, "--block-tokens", 6)
    assert "there is no directory" in refused("replay", file, "--json", tmp_path / "no" / "x.json")
    assert "there is no directory" in refused("replay", file, "--plot", tmp_path / "no" / "x.png")


@pytest.mark.parametrize("command", ["trace", "replay", "stats"])
def test_help_has_examples(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"kvstore {command} " in result.stdout.split("Examples:")[1]
