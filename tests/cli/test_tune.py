import json

import pytest

from kvstore.config import config_from_dict
from kvstore.traces import write_trace
from tests.traces import make_trace


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    directory = tmp_path_factory.mktemp("traces")
    for layer in (0, 1):
        write_trace(directory / f"tiny_layer{layer:02d}.safetensors", make_trace(n=400, layer=layer, seed=layer))
    return directory


def test_a_table_a_config_a_picture_and_json(run, traces, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    out, plot, results = (tmp_path / name for name in ("config.json", "pareto.png", "all.json"))
    result = run("tune", "--traces", traces, "--kinds", "sq4", "--out", out, "--plot", plot, "--json", results)
    assert result.exit_code == 0, result.output
    assert "recall" in result.stdout
    assert "chosen: sq4" in result.stdout
    config = config_from_dict(json.loads(out.read_text()))
    assert config.index.kind == "sq4"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {trial["name"] for trial in json.loads(results.read_text())["trials"]} >= {"sq4", "sq4, over-fetch 2"}


def test_what_cannot_be_tuned_is_refused_in_one_line(refused, traces, tmp_path):
    assert "no such directory" in refused("tune", "--traces", tmp_path / "none")
    assert "no kinds of index 'best'" in refused("tune", "--traces", traces, "--kinds", "best")
    assert "between 0 and 1" in refused("tune", "--traces", traces, "--budget", "2", "--kinds", "sq4")
    assert "there is no directory" in refused("tune", "--traces", traces, "--out", tmp_path / "no" / "c.json")


def test_without_matplotlib_nothing_is_measured(refused, traces, tmp_path, monkeypatch):
    import importlib.util

    right = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "matplotlib" else right(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    line = refused("tune", "--traces", traces, "--plot", tmp_path / "p.png")
    assert 'pip install "kvstore-engine[plot]"' in line
