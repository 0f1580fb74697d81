"""Random schedules of a store that builds indexes beside the pass, next to one that builds them at the commit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stateful.overlap_pair import Trio

WHICH, SHARES, LAYERS = st.sampled_from([0, 0, 0, 1, 2]), st.floats(0, 1), st.integers(0, 1)  # 0: the newest
WORK, STARTS, LONG = st.integers(0, 5), st.integers(0, 280), st.sampled_from([40, 64, 100])
SHORT = st.sampled_from([1, 9, 30])
CALLS = st.one_of(
    st.tuples(st.just("prompt"), STARTS, LONG, st.integers(1, 2)),
    st.tuples(st.just("prompt"), STARTS, LONG, st.just(2)),
    st.tuples(st.just("append"), WHICH, STARTS, SHORT | LONG),
    st.tuples(st.just("step"), WHICH, STARTS, SHORT | LONG),
    st.tuples(st.just("commit"), WHICH),
    st.tuples(st.just("abort"), WHICH),
    st.tuples(st.just("run"), WORK, st.integers(1, 4)),
    st.tuples(st.just("fail"), WORK),
    st.tuples(st.just("truncate"), WHICH, SHARES | st.floats(0.8, 1)),
    st.tuples(st.just("attend"), WHICH, LAYERS, st.integers(0, 9)),
    st.tuples(st.just("fork"), WHICH, SHARES),
    st.tuples(st.just("drop"), WHICH),
    st.tuples(st.just("reindex"), WHICH, LAYERS),
)
SCHEDULES = st.lists(CALLS, min_size=10, max_size=40)
SETTINGS = st.sampled_from([
    {}, {}, {"wait": False}, {"codebook": "model"}, {"weighting": "queries"}, {"kind": "page"}, {"kind": "sq4"},
])  # fmt: skip


def follow(schedule, how):
    """Do what a schedule says, and see that the stores agree after every call and at the end; return what was done."""
    trio, done = Trio(**how), []
    try:
        for name, *arguments in schedule:
            if name in ("prompt", "run", "fail"):
                getattr(trio, name)(*arguments)
            else:
                names = trio.names()[::-1]
                getattr(trio, name)(names[arguments[0] % len(names)], *arguments[1:])
            trio.check()
            done.append((name, *arguments))
        trio.finish()
        trio.check()
        assert not trio.worker.open
        if trio.waits:
            trio.check_same()
    finally:
        for store in trio.stores:
            store.close()
    return done


@settings(max_examples=100)
@given(SCHEDULES, SETTINGS)
def test_any_schedule_gives_what_building_at_the_commit_gives(schedule, how):
    assert follow(schedule, how) == [tuple(call) for call in schedule]


@pytest.mark.slow
@settings(max_examples=1000)
@given(SCHEDULES, SETTINGS)
def test_a_thousand_schedules_do(schedule, how):
    assert follow(schedule, how) == [tuple(call) for call in schedule]
