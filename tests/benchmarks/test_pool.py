"""The pool benchmark at sizes where only its shape matters, and the bounds it compares with."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import block_trace, pool
from benchmarks.belady import Belady, most_rows
from benchmarks.block_trace import (
    BlockTrace,
    BlockTraceError,
    read_block_trace,
    record_block_trace,
    write_block_trace,
)
from benchmarks.report import Report, check_report
from kvstore.buffer_pool import BufferPool, policy_names

N_LAYERS, N_BLOCKS = 3, 16


def quiet(line):
    pass


@pytest.fixture
def report():
    return Report("test", {"cpu": "any"})


@pytest.fixture
def trace():
    return make_trace()


def make_trace(n_steps=20, seed=0):
    """Steps of three layers; in each, block b holds about as many rows as it says, and a few come and go."""
    random = np.random.default_rng(seed)
    blocks, counts = [], []
    for _ in range(n_steps * N_LAYERS):
        found = np.flatnonzero(random.random(N_BLOCKS) < 0.8)
        blocks.append(found)
        counts.append(found + 1 + random.integers(0, 3, len(found)))
    layers = np.tile(np.arange(N_LAYERS), n_steps)
    return block_trace._joined(layers, blocks, counts, N_LAYERS, N_BLOCKS, 4, "made up")


def batch(ids, counts=None):
    return np.array(ids, np.int64), np.array(counts or [1] * len(ids), np.int64)


# ---- traces ----


def test_batches_have_ids_that_no_other_layer_has(trace):
    batches = list(trace.batches())
    assert len(batches) == trace.n_batches == 60
    assert trace.n_steps == 20
    for number, (ids, counts) in enumerate(batches):
        assert (ids // N_BLOCKS == number % N_LAYERS).all()
        assert len(ids) == len(counts) > 0
    step_ids, step_counts = trace.steps()[4]
    assert step_ids.tolist() == np.concatenate([ids for ids, _ in batches[12:15]]).tolist()
    assert step_counts.sum() == sum(counts.sum() for _, counts in batches[12:15])


def test_a_layer_is_a_trace_of_its_own(trace):
    alone = list(trace.layer(1).batches())
    assert len(alone) == 20
    for (ids, counts), (whole_ids, whole_counts) in zip(alone, list(trace.batches())[1::3], strict=True):
        assert (ids + N_BLOCKS).tolist() == whole_ids.tolist()
        assert counts.tolist() == whole_counts.tolist()


def test_larger_blocks_hold_what_their_parts_hold(trace):
    larger = trace.in_blocks_of(12)
    assert (larger.n_blocks, larger.block_tokens, larger.n_batches) == (6, 12, trace.n_batches)
    for layer, (ids, counts), (whole, sums) in zip(trace.layers, trace.batches(), larger.batches(), strict=True):
        wanted = {}
        for block, count in zip((ids - layer * N_BLOCKS) // 3, counts, strict=True):
            wanted[int(block)] = wanted.get(int(block), 0) + int(count)
        assert dict(zip((whole - layer * 6).tolist(), sums.tolist(), strict=True)) == wanted
    assert trace.in_blocks_of(4).blocks.tolist() == trace.blocks.tolist()
    with pytest.raises(BlockTraceError, match="blocks of 4 cannot be read in blocks of 6"):
        trace.in_blocks_of(6)


def test_a_file_brings_the_trace_back(trace, tmp_path):
    path = tmp_path / "made" / "blocks.trace"
    write_block_trace(path, trace)
    again = read_block_trace(path)
    for name, value in vars(trace).items():
        assert np.array_equal(getattr(again, name), value), name


def test_files_that_hold_no_trace(tmp_path):
    path = tmp_path / "blocks.npz"
    with pytest.raises(BlockTraceError, match="holds no block trace"):
        read_block_trace(path)
    for content in (b"", b"PK\x03\x04 and nothing more", b"text"):
        path.write_bytes(content)
        with pytest.raises(BlockTraceError, match="holds no block trace"):
            read_block_trace(path)
    for save in (np.savez, np.save):
        with path.open("wb") as file:
            save(file, np.zeros(3))
        with pytest.raises(BlockTraceError, match="holds no block trace"):
            read_block_trace(path)


def test_traces_that_contradict_themselves():
    none = np.zeros(0, np.int64)
    with pytest.raises(BlockTraceError, match="offsets"):
        BlockTrace(none, none, none, none, 1, 1, 1, "x")
    with pytest.raises(BlockTraceError, match="0 blocks have 2 counts"):
        BlockTrace(none, np.zeros(1, np.int64), none, np.ones(2, np.int64), 1, 1, 1, "x")


def test_recording_a_model(model, ids, config):
    trace = record_block_trace(
        model, ids[:300], 290, budget=0.3, block_tokens=8, name="tiny", tell=quiet, config=config
    )
    assert (trace.n_layers, trace.n_steps, trace.n_blocks, trace.block_tokens) == (2, 10, 38, 8)
    assert trace.layers.tolist() == [0, 1] * 10
    for number, (blocks, counts) in enumerate(trace.batches()):
        n_rows = 291 + number // 2
        assert (np.diff(blocks) > 0).all()
        assert counts.max() <= 8
        assert 0 < counts.sum() <= 0.3 * n_rows
        assert (blocks % trace.n_blocks).max() <= (n_rows - config.window) // 8
    assert trace.in_blocks_of(64).counts.sum() == trace.counts.sum()


# ---- bounds ----


def most_blocks(batches, n_frames):
    """The most that any pool can find, by trying everything that it could keep."""
    best = {frozenset(): 0}
    for ids, _ in batches:
        after = {}
        for held, found in best.items():
            total = found + len(held & set(ids.tolist()))
            around = held | set(ids.tolist())
            for kept in itertools.combinations(sorted(around), min(n_frames, len(around))):
                after[frozenset(kept)] = max(total, after.get(frozenset(kept), 0))
        best = after
    return max(best.values())


BATCHES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(batch), min_size=1, max_size=7)


@given(BATCHES, st.integers(0, 3))
def test_no_pool_finds_more_blocks_than_belady(batches, n_frames):
    assert Belady(batches).run(n_frames)[0].sum() == most_blocks(batches, n_frames)


def test_belady_lets_a_block_by_that_comes_back_later_than_those_it_has():
    batches = [batch([1]), batch([2]), batch([1]), batch([2]), batch([1])]
    blocks, rows = Belady(batches).run(1)
    assert blocks.tolist() == [0, 0, 1, 0, 1]
    assert rows.tolist() == [0, 0, 1, 0, 1]


def test_rows_found_are_those_of_the_blocks_found():
    batches = [batch([1, 2], [5, 7]), batch([2, 3], [9, 1]), batch([1, 2], [2, 3])]
    blocks, rows = Belady(batches).run(9)
    assert blocks.tolist() == [0, 1, 2]
    assert rows.tolist() == [0, 9, 5]


@pytest.mark.parametrize("n_frames", [0, 3, 9, 24, 48])
def test_every_policy_stays_below_both_bounds(trace, n_frames):
    batches, steps = list(trace.batches()), trace.steps()
    blocks, bound = Belady(batches).run(n_frames)[0].sum(), most_rows(steps, n_frames)
    for name, limit in itertools.product(policy_names(), (1, 4, 48)):
        with BufferPool(n_frames, 64, policy=name, admit_blocks=limit) as one:
            rows = 0
            for ids, counts in batches:
                rows += counts[one.lookup(ids) >= 0].sum()
                one.admit(ids, counts, lambda block, frame: None)
            assert one.counters.hits <= blocks
            assert rows <= bound
    if n_frames == 48:
        seen, everything = set(), 0
        for ids, counts in batches:
            everything += sum(c for block, c in zip(ids.tolist(), counts.tolist(), strict=True) if block in seen)
            seen |= set(ids.tolist())
        assert bound == everything == Belady(batches).run(48)[1].sum()


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
