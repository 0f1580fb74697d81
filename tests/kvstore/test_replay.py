"""Policies and bounds on traces: nothing finds more than Belady, and every policy finds what it should."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffer_pool import BufferPool, admission_limit, policy_names
from kvstore.errors import ConfigError
from kvstore.replay.belady import Belady, most_rows
from kvstore.replay.policies import DEFAULT_SHARES, replay, run_policy
from kvstore.replay.trace import BlockTraceError
from tests.block_traces import batch, make_trace, trace_of


@pytest.fixture
def trace():
    return make_trace()


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


IDS = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)
BATCHES = st.lists(IDS.map(batch), min_size=1, max_size=7)


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


BLOCKS = st.lists(st.integers(0, 15), max_size=8, unique=True).map(sorted)
TRACES = st.lists(BLOCKS, min_size=2, max_size=24).filter(any).map(lambda b: trace_of(b[: len(b) // 2 * 2], n_layers=2))


@given(TRACES.filter(lambda t: len(t.blocks)), st.integers(1, 12), st.floats(0.01, 1))
def test_no_policy_beats_belady(trace, admit_blocks, share):
    [result] = replay(trace, [share], admit_blocks=admit_blocks)
    assert [one.policy for one in result.policies] == policy_names()
    for one in result.policies:
        assert 0 <= one.hits <= result.best_hits <= one.lookups == len(trace.blocks)
        assert 0 <= result.of_best(one) <= 1


# ---- policies ----


def simulated(batches, n_frames, limit, victim):
    """Hits and loads of a pool that evicts what `victim` names of (time of last use, number of uses) by block."""
    held, hits, loads, clock = {}, 0, 0, itertools.count()
    for ids, counts in batches:
        hits += sum(block in held for block in ids.tolist())
        best = sorted(zip(-counts, range(len(ids)), ids.tolist(), strict=True))[: min(limit, n_frames)]
        wanted = [block for _, _, block in best]
        new = [block for block in wanted if block not in held]
        while len(held) + len(new) > n_frames:
            del held[victim({block: use for block, use in held.items() if block not in wanted})]
        loads += len(new)
        for some in (new, [block for block in wanted if block in held]):
            for block in some[::-1]:
                held[block] = next(clock)
    return hits, loads


def least_recent(held):
    return min(held, key=held.get)


@pytest.mark.parametrize(("n_frames", "limit"), [(1, 1), (4, 2), (9, 3), (9, 16), (30, 5), (48, 48)])
def test_lru_finds_what_a_simple_simulation_finds(trace, n_frames, limit):
    batches = list(trace.batches())
    one = run_policy(batches, n_frames, "lru", limit)
    assert (one.hits, one.loaded) == simulated(batches, n_frames, limit, least_recent)
    assert one.lookups == len(trace.blocks)
    assert one.rows == trace.counts.sum()


def test_a_trace_by_hand():
    """Two frames; each batch lets in its best block. Found: 1 in the third batch, 2 and 1 in the fourth."""
    trace = trace_of([[1], [2], [1, 3], [1, 2, 3]], [[5], [5], [7, 2], [1, 2, 9]], n_blocks=4)
    [result] = replay(trace, [0.5], ["lru"], admit_blocks=1)
    [one] = result.policies
    assert (result.n_frames, one.lookups, one.hits, one.loaded) == (2, 7, 3, 3)
    assert (one.rows, one.rows_found) == (31, 10)
    assert result.best_hits == 3
    assert result.of_best(one) == 1
    assert one.hit_rate == pytest.approx(3 / 7)
    assert one.row_rate == pytest.approx(10 / 31)


def test_by_default_all_policies_run_in_pools_of_three_sizes(trace):
    results = replay(trace)
    assert [result.share for result in results] == list(DEFAULT_SHARES)
    assert [result.n_frames for result in results] == [2, 5, 10]
    for result in results:
        assert [one.policy for one in result.policies] == ["arc", "clock", "lfu", "lru", "score-decay"]
        assert {one.admit_blocks for one in result.policies} == {admission_limit(result.n_frames, 3)}
    json.dumps([result.as_dict() for result in results])


def test_progress_counts_to_the_end(trace):
    told = []
    replay(trace, [0.1, 0.5], ["lru", "lfu"], tell=lambda *step: told.append(step))
    assert told == [("replaying", done, 4) for done in range(4)]


def test_a_pool_that_lets_nothing_in_finds_nothing(trace):
    [result] = replay(trace, [0.5], ["lru"], admit_blocks=0)
    assert (result.policies[0].hits, result.policies[0].loaded) == (0, 0)
    assert result.best_hits > 0


def test_blocks_that_never_come_back_leave_nothing_to_find():
    [result] = replay(trace_of([[0], [1], [2]]), [1.0])
    assert result.best_hits == 0
    assert {result.of_best(one) for one in result.policies} == {1.0}


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_shares_out_of_range(trace, share):
    with pytest.raises(ConfigError, match="up to 100 %"):
        replay(trace, [share])


def test_policies_that_are_not_known(trace):
    with pytest.raises(ConfigError, match=r"'belady'; known are arc, clock"):
        replay(trace, policies=["lru", "belady"])
    with pytest.raises(ConfigError, match="known are"):
        replay(trace, policies=[])
    assert "belady" not in [name.lower() for name in policy_names()]


def test_a_trace_in_which_nothing_is_read():
    with pytest.raises(BlockTraceError, match="no step of the trace selects any rows"):
        replay(trace_of([[], []]))
