import io
import json
import math

import pytest

from benchmarks.report import Metric, Report, ReportError, check_report

TIME = Metric("time", "s", "lower")
RATE = Metric("rate", "tokens/s", "higher")
PLAIN = Metric("length", "tokens", "neither")


@pytest.fixture
def report():
    report = Report("some", {"cpu": "any", "cores": 2})
    report.add("short", TIME, 2.0, "peer", 3.0)
    report.add("short", RATE, 2.0, "peer", 3.0)
    report.add("long", PLAIN, None, "peer", None)
    return report


@pytest.mark.parametrize(
    ("metric", "ours", "peer", "ratio"),
    [
        (TIME, 2.0, 3.0, 1.5),
        (TIME, 3.0, 2.0, 2 / 3),
        (RATE, 3.0, 2.0, 1.5),
        (RATE, 2.0, 3.0, 2 / 3),
        (PLAIN, 2.0, 3.0, None),
        (TIME, None, 3.0, None),
        (RATE, 2.0, None, None),
        (TIME, 0.0, 3.0, None),
        (RATE, 1.0, 0.0, None),
    ],
)
def test_ratio_above_one_means_that_ours_is_better(metric, ours, peer, ratio):
    assert metric.ratio(ours, peer) == (None if ratio is None else pytest.approx(ratio))


def test_json_has_the_agreed_shape_and_reads_back(report, tmp_path):
    path = tmp_path / "made" / "some.json"
    report.write(path)
    data = json.loads(path.read_text())
    assert list(data) == ["name", "machine", "rows"]
    assert [list(row) for row in data["rows"]] == [
        ["case", "metric", "unit", "ours", "peer", "peer_value", "ratio"]
    ] * 3
    assert data["rows"][0]["ratio"] == pytest.approx(1.5)
    assert data["rows"][2]["ours"] is None
    assert data == report.as_dict()
    check_report(data)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_figures_must_be_finite(report, bad):
    with pytest.raises(ReportError, match="finite"):
        report.add("case", TIME, bad, "peer", 1.0)
    assert len(report.rows) == 3


@pytest.mark.parametrize("field", ["case", "peer"])
def test_texts_must_say_something(report, field):
    texts = {"case": "case", "peer": "peer", field: ""}
    with pytest.raises(ReportError, match=field):
        report.add(texts["case"], TIME, 1.0, texts["peer"], 1.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data.pop("machine"), "keys"),
        (lambda data: data.update(name=""), "name"),
        (lambda data: data.update(machine={}), "machine"),
        (lambda data: data.update(rows=[]), "row"),
        (lambda data: data["rows"][0].pop("unit"), "fields"),
        (lambda data: data["rows"][0].update(ours="2"), "ours"),
    ],
)
def test_other_shapes_are_refused(report, change, match):
    data = report.as_dict()
    change(data)
    with pytest.raises(ReportError, match=match):
        check_report(data)


def test_table_shows_every_row_and_each_case_once(report):
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.table())
    text = console.export_text()
    assert text.count("short") == 1
    assert "1.50" in text
    assert "0.67" in text
    assert text.count("peer") == 2 + 3  # two headings, three rows
