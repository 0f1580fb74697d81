import json

import pytest
from typer.testing import CliRunner

from benchmarks import spill
from benchmarks.report import Report, check_report
from kvstore.storage.shape import RowShape

TINY = spill.Options(n_extents=10, batch=4, shape=RowShape("float16", 1, 8, 2, 32, 32), rounds=2, settle_seconds=0.0)


def test_a_run_compares_writing_and_reading_with_both_peers(tmp_path):
    report, told = Report("spill", {"cpu": "test"}), []
    spill.run_spill(TINY, tmp_path, report, told.append)
    assert [(row.metric, row.peer) for row in report.rows] == [
        (metric, peer) for metric in ("write", "write", "read") for peer in (spill.RAW, spill.FILES)
    ]
    assert {row.unit for row in report.rows} == {"MB/s"}
    assert all(row.ours > 0 and row.peer_value > 0 and row.ratio > 0 for row in report.rows)
    assert len({row.case for row in report.rows}) == 3
    assert len(told) == 2 * (3 + 3 + 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", spill.STORES)
@pytest.mark.parametrize("damage", ["lost", "wrong"])
def test_a_competitor_that_loses_bytes_ends_the_run(tmp_path, name, damage):
    work = spill.Work(TINY)
    store = spill.STORES[name](tmp_path, work, "process")
    work.write(store)
    work.check(store, name)
    real = store.read
    store.read = lambda numbers: [None if damage == "lost" else b"x" for _ in real(numbers)]
    with pytest.raises(SystemExit, match=f"did not come back from {name}"):
        work.check(store, name)
    store.close()


def test_the_command_writes_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "QUICK", TINY)
    path = tmp_path / "spill.json"
    done = CliRunner().invoke(spill.app, ["--quick", "--json", str(path), "--folder", str(tmp_path / "disk")])
    assert done.exit_code == 0, done.output
    check_report(json.loads(path.read_text()))
    assert {"lmdb", "xxhash", "cores"} <= set(json.loads(path.read_text())["machine"])
