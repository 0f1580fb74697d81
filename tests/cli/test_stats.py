"""The statistics of a store from the command line."""

import json
import os
import time

import pytest

from kvstore import KVStore
from kvstore.cli.stats import _ago
from kvstore.stats_file import STATS_NAME
from tests.builders import SCHEMA, fill, make_query
from tests.kvstore.test_durable import small


@pytest.fixture
def path(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 1234)
        store["book"].attend(0, make_query(SCHEMA, 1))
    return tmp_path / "s"


def make_older(path, seconds):
    plain = json.loads((path / STATS_NAME).read_text())
    (path / STATS_NAME).write_text(json.dumps({**plain, "unix_time_s": time.time() - seconds}))


def test_a_table_says_what_was_there_how_long_ago_and_who_has_it_open(run, path):
    make_older(path, 7200 + 60)
    result = run("stats", path)
    assert result.exit_code == 0, result.output
    assert "not open to write" in result.stdout
    assert f"written 2 hours ago by process {os.getpid()}" in " ".join(result.stdout.split())
    assert "1,234" in result.stdout
    assert "1 index" in result.stdout
    with KVStore.open(path):
        assert f"open to write in process {os.getpid()}" in " ".join(run("stats", path).stdout.split())


def test_json_has_every_statistic(run, path):
    found = json.loads(run("stats", path, "--json").stdout)
    assert set(found) == {"unix_time_s", "pid", "stats", "age_s", "open"}
    assert found["stats"]["rows"] == 1234
    assert found["stats"]["counters"]["attends"] == {"dense": 0, "flat": 0, "index": 1}
    assert found["open"] is None
    with KVStore.open(path):
        assert json.loads(run("stats", path, "--json").stdout)["open"]["pid"] == os.getpid()


def test_prometheus_text(run, path):
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    result = run("stats", path, "--prometheus")
    assert result.exit_code == 0, result.output
    assert "kvstore_rows 1234.0\n" in result.stdout
    assert 'kvstore_attends_total{plan="index"} 1.0\n' in result.stdout


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "written at the first flush"), (b"{", "is damaged"), (b"", "is damaged")]
)
def test_without_statistics_it_says_so(run, refused, path, content, reason):
    (path / STATS_NAME).unlink()
    if content is not None:
        (path / STATS_NAME).write_bytes(content)
    result = run("stats", path)
    assert result.exit_code == 0, result.output
    assert "no statistics" in result.stdout
    assert reason in result.stdout
    found = json.loads(run("stats", path, "--json").stdout)
    assert found["stats"] is None
    assert reason in found["reason"]
    assert reason in refused("stats", path, "--prometheus")


def test_what_is_refused_in_one_line(refused, path, tmp_path):
    assert "no store in" in refused("stats", tmp_path / "none")
    assert "no store in" in refused("stats", tmp_path)
    assert "exclude each other" in refused("stats", path, "--json", "--prometheus")
    (path / "manifest.json").write_text("{")
    assert "damaged" in refused("stats", path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (7200, "2 hours"), (1e6, "12 days")],
)
def test_an_age_is_in_a_unit_that_fits(seconds, text):
    assert _ago(seconds) == text
