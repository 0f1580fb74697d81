"""One layer's attention at sizes where only the shape of the report and its checks matter."""

import json
from collections import namedtuple
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import attend, attend_rows
from benchmarks.attend_ours import RAW, ROPE
from benchmarks.attend_peers import LAYOUTS, PACKED, read_bytes_per_s
from benchmarks.report import Report, check_report
from benchmarks.speed import WrongResultError
from kvstore import KVStore

TINY = attend.Options(
    lengths=(1000, 2000), kinds=(ROPE, RAW), budgets=(128, 0.1), heads=2, group=2, head_dim=32, queries=2,
    rounds=1,
)  # fmt: skip
ONE = replace(TINY, lengths=(1000,), dtypes=("float32",), kinds=(ROPE,))


def quiet(line):
    pass


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(attend, "ROUND_S", 1e-4)
    monkeypatch.setattr("benchmarks.attend_peers._READ_BYTES", 1 << 20)
    return Report("test", {"cpu": "any"})


def test_every_question_is_answered(report, monkeypatch):
    monkeypatch.setattr(attend_rows, "TARGET_ROWS", 2000)
    attend.run_attend(TINY, report, quiet)
    check_report(report.as_dict())
    cases = {row.case for row in report.rows if row.metric == attend_rows.TIME.name}
    assert len(cases) == 2 * 2 * 2 * 2
    assert "2,000 rows, bfloat16, rope 1x8, 1/10" in cases
    for case in cases:
        rows = {(row.metric, row.peer): row for row in report.rows if row.case == case}
        times = [rows[attend_rows.TIME.name, layout] for layout in LAYOUTS]
        assert all(row.unit == "ms" and row.ours > 0 and row.ratio == row.peer_value / row.ours for row in times)
        goal = rows[attend_rows.GOAL.name, attend_rows.TARGET]
        assert goal.ours == pytest.approx(min(row.peer_value for row in times) / times[0].ours)
        assert rows[attend_rows.PROCESSOR.name, attend_rows.BEST].ratio > 0
        assert rows[attend_rows.BYTES.name, attend_rows.FULL].ratio > 1
        error = rows[attend_rows.ERROR.name, attend_rows.LIMIT]
        assert 0 < error.ours <= error.peer_value == attend.LIMITS[case.split(", ")[1]]
        mass = rows[attend_rows.MASS.name, attend_rows.EXACT]
        assert 0 < mass.ours <= mass.peer_value * (1 + 1e-6) <= 1 + 1e-6
    met = {row.case: row.peer_value for row in report.rows if row.metric == attend_rows.GOAL.name}
    assert met["2,000 rows, float32, rope 1x8, 1/10"] == 4.0
    assert met["1,000 rows, float32, rope 1x8, 1/10"] is None
    crossings = [row for row in report.rows if row.metric == attend_rows.CROSSING.name]
    assert len(crossings) == 2 * 2 * 2
    assert all(row.ours is None or 1000 <= row.ours <= 2000 for row in crossings)


def test_the_split_adds_up(report):
    attend.run_attend(ONE, report, quiet)
    [whole] = [r for r in report.rows if r.case.endswith("k = 128") and r.peer == PACKED and r.unit == "ms"]
    names = [m.name for m in (attend_rows.SCAN, attend_rows.SELECT, attend_rows.FETCH, attend_rows.REST)]
    parts = [row for row in report.rows if row.metric in names and row.case == whole.case]
    assert sum(row.ours for row in parts) == pytest.approx(whole.ours)
    assert all(row.peer_value == whole.ours for row in parts)


def test_a_budget_that_covers_all_rows_reads_no_codes(report):
    attend.run_attend(replace(ONE, budgets=(1000,)), report, quiet)
    rows = {row.metric: row for row in report.rows if row.case == "1,000 rows, float32, rope 1x8, k = 1,000"}
    assert rows[attend_rows.BYTES.name].ours == rows[attend_rows.BYTES.name].peer_value
    assert rows[attend_rows.MASS.name].ours == pytest.approx(1.0)


def test_a_wrong_result_of_ours_stops_the_run_before_it_is_timed(report, monkeypatch):
    right = KVStore.attend
    monkeypatch.setattr(KVStore, "attend", lambda *args, **options: 1.01 * right(*args, **options))
    lines = []
    with pytest.raises(WrongResultError, match="from attention over the same rows"):
        attend.run_attend(ONE, report, lines.append)
    assert not any("round" in line for line in lines)


def test_a_row_that_is_taken_twice_stops_the_run(report, monkeypatch):
    from benchmarks.attend_ours import Tap

    right = Tap.rows

    def twice(tap):
        rows = right(tap)
        rows[:, 0] = rows[:, 1]
        return rows

    monkeypatch.setattr(Tap, "rows", twice)
    with pytest.raises(WrongResultError, match="a row twice"):
        attend.run_attend(ONE, report, quiet)


def test_a_wrong_result_of_torch_stops_the_run(report, monkeypatch):
    right = attend.layouts

    def wrong(layer):
        found = right(layer)
        return {**found, PACKED: lambda i: found[PACKED](i) * 1.01}

    monkeypatch.setattr(attend, "layouts", wrong)
    with pytest.raises(WrongResultError, match="group as query rows"):
        attend.run_attend(ONE, report, quiet)


def test_the_store_attends_as_before_once_it_has_been_listened_to():
    import torch

    from benchmarks.attend_ours import Tap, stored, tapped

    [(_, layer, rope)] = attend._layers(ONE, 1000, ["float32"], quiet)
    with stored(layer, rope, ROPE) as seq:
        before = seq.attend(0, layer.q[0], budget=128)
        tap = Tap()
        with tapped(seq, tap):
            assert torch.equal(seq.attend(0, layer.q[0], budget=128), before)
        assert len(tap.plans) == len(tap.done) == 1
        assert torch.equal(seq.attend(0, layer.q[0], budget=128), before)
        assert len(tap.done) == 1


def test_lengths_that_memory_does_not_allow_are_left_out_and_named(report, monkeypatch):
    available = namedtuple("Memory", "available")(ONE.needed_bytes(1500, "float32"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: available)
    lines = []
    attend.run_attend(replace(ONE, lengths=(1000, 2000)), report, lines.append)
    assert any("2,000 rows, float32: LEFT OUT" in line for line in lines)
    assert not any(row.case.startswith("2,000") for row in report.rows)


def test_reading_memory_takes_time(monkeypatch):
    monkeypatch.setattr("benchmarks.attend_peers._READ_BYTES", 1 << 23)
    assert 1e8 < read_bytes_per_s() < 1e13


def test_the_command_writes_json(tmp_path, monkeypatch, report):
    monkeypatch.setattr(attend, "QUICK", ONE)
    monkeypatch.setattr(attend, "set_threads", lambda count: None)
    done = CliRunner().invoke(attend.app, ["--quick", "--json", str(tmp_path / "attend.json")])
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "attend.json").read_text())
    check_report(data)
    assert data["name"] == "attend"


@pytest.mark.parametrize("arguments", [["--lengths", "many"], ["--dtypes", "float8"], ["--rounds", "0"]])
def test_bad_arguments_are_refused_before_anything_runs(arguments):
    assert CliRunner().invoke(attend.app, arguments).exit_code == 2
