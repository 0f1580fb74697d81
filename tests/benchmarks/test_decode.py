import math
from dataclasses import replace

import pytest

from benchmarks import decode_rows
from benchmarks.decode import Options, app, run_decode
from benchmarks.engines import DENSE_PEERS
from benchmarks.inputs import places, read_text
from benchmarks.quality import DEFAULT, EXACT, RANDOM, index_configs
from benchmarks.report import Report, check_report
from benchmarks.speed import Effort, WrongResultError, measure_speed

EFFORT = Effort(prompts=1, blocks=2, block_tokens=8, check_tokens=4)
OPTIONS = Options(
    lengths=(150, 300),
    effort=EFFORT,
    quality_context=200,
    quality_tokens=6,
    quality_places=2,
    quality_budgets=(0.2,),
)


@pytest.fixture
def configs(config):
    sizes = {"sinks": 2, "window": 16, "dense_rows": 32, "min_selected": 8}
    return {
        name: replace(settings, **sizes, index=replace(settings.index, min_rows=64))
        for name, settings in index_configs().items()
    }


@pytest.mark.hf
def test_every_question_is_answered(model, ids, configs):
    report, lines = Report("decode", {"cpu": "any"}), []
    run_decode(model, ids, OPTIONS, report, lines.append, configs=configs)
    check_report(report.as_dict())
    rows = report.rows
    for length in OPTIONS.lengths:
        for budget in ("full budget", "1/5", "1/10"):
            decode = [row for row in rows if row.case == f"{length} tokens, store, {budget}" and row.metric == "decode"]
            wanted = [*DENSE_PEERS, *([] if budget == "full budget" else ["store, full budget"])]
            assert [row.peer for row in decode] == wanted
            assert all(row.ours > 0 and row.ratio == pytest.approx(row.ours / row.peer_value) for row in decode)
        first = [row for row in rows if row.case == f"{length} tokens, store" and row.metric == "first token"]
        assert [row.peer for row in first] == list(DENSE_PEERS)
        assert all(row.ratio == pytest.approx(row.peer_value / row.ours) for row in first)
    exact = [row for row in rows if row.metric == decode_rows.DIFFERENCE.name]
    assert [row.ours < 1e-3 for row in exact] == [True, True]
    assert {row.peer for row in rows if row.metric == decode_rows.KL.name} == {EXACT, RANDOM}
    assert lines


@pytest.mark.hf
def test_the_split_and_break_even_are_told_for_every_budget(model, ids, configs):
    report = Report("decode", {"cpu": "any"})
    run_decode(model, ids, replace(OPTIONS, quality_places=0), report, lambda line: None, configs=configs)
    check_report(report.as_dict())
    for budget in ("full budget", "1/5", "1/10"):
        for length in OPTIONS.lengths:
            case = f"{length} tokens, store, {budget}"
            split = {row.metric: row for row in report.rows if row.case == case and row.metric != "decode"}
            step = split[decode_rows.STEP.name].ours
            parts = [row.ours for row in split.values() if row.metric.startswith("of it")]
            assert len(parts) == 7
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(step)
            assert 0 < split[decode_rows.OUTSIDE.name].ours < 1
            assert split[decode_rows.APPEND.name].ours > 0
            assert split[decode_rows.COMMIT_TOKEN.name].ours > 0
        rows = [row for row in report.rows if row.case == f"all lengths, store, {budget}"]
        assert {row.metric for row in rows} == {decode_rows.BREAK_EVEN.name}
        assert [row.peer for row in rows] == [
            *([] if budget == "full budget" else ["store, full budget"]),
            *DENSE_PEERS,
        ]


@pytest.mark.hf
def test_lengths_beyond_the_trained_one_tell_costs_only(model, ids, configs):
    report, lines = Report("decode", {"cpu": "any"}), []
    options = replace(OPTIONS, lengths=(900,), budgets=(0.1,), quality_places=0)
    load = pytest.fail  # memory is not measured where nothing can be read
    run_decode(model, ids, options, report, lines.append, load=load, configs=configs, trained_tokens=200)
    check_report(report.as_dict())
    cases = {row.case for row in report.rows if not row.case.startswith("all lengths")}
    assert cases == {f"900 tokens (cost only), store, {budget}" for budget in ("full budget", "1/10")}
    metrics = {row.metric for row in report.rows}
    assert {"decode", "largest logit difference", "append", "faster from length"} <= metrics
    assert not metrics & {"first token", "peak memory"}
    assert any("reading 192 tokens" in line for line in lines)


@pytest.mark.hf
def test_a_length_that_memory_has_no_room_for_is_left_out_and_named(model, ids, configs, monkeypatch):
    from benchmarks.filling import Passage

    monkeypatch.setattr(Passage, "fits", lambda passage, n_rows: False)
    report, lines = Report("decode", {"cpu": "any"}), []
    options = replace(OPTIONS, lengths=(100, 300), budgets=(0.1,), quality_places=0)
    run_decode(model, ids, options, report, lines.append, configs=configs, trained_tokens=200)
    assert not any("300" in row.case for row in report.rows)
    assert any(line.startswith("300 tokens") and "LEFT OUT" in line for line in lines)


@pytest.mark.hf
def test_nothing_is_timed_that_computes_something_else(model, ids, configs, monkeypatch):
    from benchmarks.views import ViewsLayer

    right = ViewsLayer.update
    monkeypatch.setattr(ViewsLayer, "update", lambda *args, **kwargs: tuple(x * 1.01 for x in right(*args, **kwargs)))
    lines = []
    with pytest.raises(WrongResultError, match="preallocated views"):
        measure_speed(model, ids, 100, (None,), EFFORT, lines.append, configs[DEFAULT])
    assert not any("decode" in line for line in lines)


@pytest.mark.hf
def test_a_text_that_is_too_short_is_refused(model, ids):
    with pytest.raises(ValueError, match="need a text of 409 tokens"):
        measure_speed(model, ids, 400, (None,), EFFORT, print)


@pytest.mark.parametrize(
    ("gains", "length"),
    [
        ([1.2, 1.4, 2.0], 100.0),
        ([0.5, 1.5, 2.0], 150.0),
        ([0.5, 0.9, 1.0], 400.0),
        ([1.2, 0.5, 1.5], 300.0),
        ([2.0, 1.2, 0.9], None),
    ],
)
def test_break_even(gains, length):
    found = decode_rows.break_even([100, 200, 400], gains)
    assert found == (None if length is None else pytest.approx(length))


def test_places_span_the_text():
    import torch

    text = torch.arange(100)
    assert [spot[0].item() for spot in places(text, 10, 3)] == [0, 45, 90]
    assert [len(spot) for spot in places(text, 100, 1)] == [100]
    with pytest.raises(ValueError, match="fewer"):
        places(text, 101, 1)


def test_there_is_text_to_read(tmp_path):
    assert len(read_text(None)) > 60_000
    path = tmp_path / "text.txt"
    path.write_text("words", encoding="utf-8")
    assert read_text(path) == "words"


def test_full_run_fits_the_models_context():
    options = Options()
    assert options.tokens_needed(8192) <= 8193
    assert [n for n in options.lengths if n <= options.longest_prompt(8192)] == [1024, 2048, 4096, 8064]
    assert options.longest_prompt(None) == max(options.lengths)
    assert math.isclose(max(Options().budgets), 0.2)


@pytest.mark.parametrize("arguments", [["--lengths", "many"], ["--lengths", "0,5"], ["--repeats", "0"]])
def test_bad_arguments_are_refused_before_anything_runs(arguments):
    from typer.testing import CliRunner

    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_help():
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "--quality" in result.output
