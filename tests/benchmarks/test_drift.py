"""Quality by generated length, on small made-up traces and a tiny model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import drift
from benchmarks.drift_runs import ALWAYS, AUTO, BY_DRIFT, KINDS, NEVER, bins, budget_rule, play, queries_of
from benchmarks.report import Report, check_report
from benchmarks.speed import WrongResultError
from tests.traces import ROPE, make_trace, rotated

TINY = drift.Options(prompt=340, factors=(0.0, 0.5), width=16, share=0.2)
SHORT = replace(TINY, factors=(0.0, 0.1), kinds=("rope 1x8",), policies=(NEVER,))


def quiet(line):
    pass


@pytest.fixture(scope="module")
def traces():
    return [with_queries(make_trace(n=TINY.tokens, n_queries=8, seed=seed, layer=seed)) for seed in (0, 1)]


def with_queries(trace):
    """The trace with calibration queries at every fourth position."""
    positions = np.arange(8, trace.n_tokens - 16, 4)
    asked = np.random.default_rng(9).standard_normal((4, len(positions), 16))
    q_cal = rotated(asked, positions, ROPE).astype(np.float16)
    return replace(trace, q_cal=q_cal, cal_pos=positions.astype(np.int32))


@pytest.fixture
def report():
    return Report("test", {"cpu": "any"})


def test_every_question_is_answered(traces, report):
    found = drift.run_drift(traces, TINY, report, quiet)
    check_report(report.as_dict())
    assert set(found) == {(kind, policy) for kind in KINDS for policy in (NEVER, BY_DRIFT, AUTO, ALWAYS)}
    rows = {(row.case, row.metric): row for row in report.rows}
    for kind, policy in found:
        for factor in ("0", "0.5"):
            case = f"{kind}, trained again {policy}, {factor} x 340 generated"
            mid = rows[case, drift.MID.name]
            assert 0 < mid.ours <= mid.peer_value + 1e-9 <= 1 + 1e-9
            assert mid.ratio == mid.ours / mid.peer_value
            assert 0 < rows[case, drift.MASS.name].ours <= 1
        assert rows[f"{kind}, trained again {policy}, all lengths", drift.KEPT.name].peer == drift.AT_PROMPT
    behind_prompt = [found[kind, policy][0.0] for kind, policy in found]
    assert len({point.exact_mid for point in behind_prompt}) == 1  # all pick from the same rows
    assert found["raw 2x6", ALWAYS][0.5].builds == 2
    assert found["raw 2x6", NEVER][0.5].builds == 1


def test_the_same_run_gives_the_same_figures(traces):
    places = bins(traces[0], 340, (0.0, 0.5), 16)
    runs = [play(traces, "raw 4x8", BY_DRIFT, 340, 0.2, places) for _ in range(2)]
    assert runs[0][0.5].mid == runs[1][0.5].mid


def test_rotated_keys_drift_where_those_before_rope_do_not(traces):
    places = bins(traces[0], 340, (0.5,), 16)
    kept = {}
    for kind in ("rope 1x8", "raw 4x8"):
        point = play(traces, kind, NEVER, 340, 0.2, places)[0.5]
        kept[kind] = point.drift
    assert kept["rope 1x8"] < kept["raw 4x8"]


@pytest.mark.parametrize("figure", ["middle_mass", "chosen"])
def test_a_wrong_answer_stops_the_run(traces, report, monkeypatch, figure):
    from kvstore.mass import measure

    def wrong(*args):
        right = measure(*args)
        if figure == "middle_mass":
            return replace(right, middle_mass=right.middle_mass + 0.01)
        return replace(right, chosen=np.repeat(right.chosen[:, :1], right.chosen.shape[1], 1))

    monkeypatch.setattr("kvstore.attending.measure", wrong)
    with pytest.raises(WrongResultError, match="share found is said" if figure == "middle_mass" else "a row twice"):
        drift.run_drift(traces, TINY, report, quiet)


def test_queries_come_from_the_whole_text(traces):
    positions, queries = queries_of(traces[0])
    assert len(positions) == queries.shape[1]
    assert np.all(np.diff(positions) > 0)
    places = bins(traces[0], 340, (0.0, 0.5), 16)
    for numbers, low in zip(places.values(), (340, 502), strict=True):
        assert all(low <= position < low + 16 for position in positions[numbers])
    with pytest.raises(ValueError, match="no query"):
        bins(replace(traces[0], q_cal=None, cal_pos=None), 100, (0.0,), 16)


def test_the_budget_counts_rows_besides_sinks_and_window():
    assert budget_rule(0.1)(0, 0, 1000) == 4 + 64 + 100


def test_the_picture_shows_every_line_once(traces, report, tmp_path):
    pytest.importorskip("matplotlib", reason="draws")
    from benchmarks.drift_plot import draw

    found = drift.run_drift(traces, replace(TINY, policies=(NEVER, ALWAYS)), report, quiet)
    draw(found, "title", tmp_path / "images" / "drift.png")
    assert (tmp_path / "images" / "drift.png").stat().st_size > 5000


@pytest.mark.hf
def test_a_model_is_recorded_as_far_as_the_lengths_need(model, ids):
    traces = drift.record(model, ids.tolist(), SHORT, quiet)
    assert [trace.n_tokens for trace in traces] == [SHORT.tokens] * 2
    assert all(bins(trace, SHORT.prompt, SHORT.factors, SHORT.width) for trace in traces)
    with pytest.raises(ValueError, match="need 382"):
        drift.record(model, ids[:300].tolist(), SHORT, quiet)


@pytest.mark.hf
def test_the_command_writes_json_and_a_picture(model, ids, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="draws")
    loaded = SimpleNamespace(model=model, tokenizer=lambda text, **options: {"input_ids": ids.tolist()})
    monkeypatch.setattr("kvstore.adapters.model_files.load_model", lambda path, report: loaded)
    monkeypatch.setattr(drift, "QUICK", SHORT)
    arguments = ["--quick", "--json", str(tmp_path / "drift.json"), "--plot", str(tmp_path / "drift.png")]
    done = CliRunner().invoke(drift.app, arguments)
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "drift.json").read_text())
    check_report(data)
    assert data["name"] == "drift"
    assert (tmp_path / "drift.png").exists()


def test_bad_arguments_are_refused_before_anything_runs():
    assert CliRunner().invoke(drift.app, ["--prompt", "10"]).exit_code == 2
