"""The pool benchmark at sizes where only its shape matters."""

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import pool
from benchmarks.report import Report, check_report
from kvstore.buffer_pool import policy_names
from kvstore.replay.trace import write_block_trace
from tests.block_traces import make_trace


def quiet(line):
    pass


@pytest.fixture
def report():
    return Report("test", {"cpu": "any"})


@pytest.fixture
def trace():
    return make_trace()


# ---- rows ----


def test_hit_rates(trace, report):
    pool.add_hit_rates(trace, pool.Options(shares=(0.25, 0.5)), report, quiet)
    check_report(report.as_dict())
    blocks = [row for row in report.rows if row.metric == pool.BLOCKS.name]
    assert len(blocks) == 2 * len(policy_names())
    assert all(0 < row.ours <= row.peer_value < 1 and row.peer == pool.BELADY for row in blocks)
    rows = [row for row in report.rows if row.metric == pool.ROWS.name]
    assert all(row.ours <= row.peer_value < 1 for row in rows if row.peer == pool.BOUND)
    split = [row for row in rows if row.peer == pool.SPLIT]
    assert [("lru" in row.case, 0 < row.peer_value < 1) for row in split] == [(True, True)] * 2
    [few, _] = [row.peer_value for row in rows if row.peer == pool.NO_LIMIT]
    assert few < split[0].ours


def test_costs(report):
    options = pool.Options(lookups=32, frames=100, blocks=300, batches=4, rounds=2)
    pool.add_costs(options, report, quiet)
    check_report(report.as_dict())
    assert [row.metric for row in report.rows] == [
        metric.name for metric in (pool.LOOKUP, pool.USE, pool.USE, pool.STEP)
    ]
    assert {row.peer for row in report.rows} == {"cachetools LRUCache", "cachetools LFUCache"}


def test_unequal_hits_stop_the_run(report, monkeypatch):
    monkeypatch.setattr(pool.Cachetools, "step", lambda self, ids: None)
    options = pool.Options(lookups=32, frames=100, blocks=300, batches=2, rounds=2)
    with pytest.raises(pool.UnequalHitsError, match="cachetools LRUCache 0"):
        pool.add_costs(options, report, quiet)


def test_batches_that_are_timed_ask_for_different_blocks():
    batches = pool.skewed_batches(20, 32, 300)
    assert all(len(set(ids.tolist())) == 32 and 0 <= ids.min() <= ids.max() < 300 for ids in batches)
    assert not np.array_equal(batches[0], batches[1])


def test_the_command_replays_a_file(trace, tmp_path, monkeypatch):
    monkeypatch.setattr(
        pool, "QUICK", pool.Options(block_tokens=8, lookups=16, frames=40, blocks=90, batches=2, rounds=1)
    )
    write_block_trace(tmp_path / "blocks.npz", trace)
    arguments = ["--quick", "--trace", str(tmp_path / "blocks.npz"), "--json", str(tmp_path / "pool.json")]
    done = CliRunner().invoke(pool.app, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "pool.json").stat().st_size > 1000
