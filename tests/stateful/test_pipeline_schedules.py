"""Random schedules over all ways of building indexes and of taking turns, with workers that are late or fail."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stateful.pipeline import Pipeline

WHICH, SHARES, LAYER = st.sampled_from([0, 0, 0, 1, 2, 3]), st.floats(0, 1) | st.floats(0.8, 1), st.integers(0, 1)
STARTS, LONG, SHORT = st.integers(0, 399), st.sampled_from([40, 64, 100]), st.sampled_from([1, 9, 30])
WORK, SEEDS, BUDGETS = st.integers(0, 5), st.integers(0, 9), st.sampled_from([None, 24, 0.3, 1.0])
OF_A_SEQUENCE = st.one_of(
    st.tuples(st.just("append"), WHICH, STARTS, SHORT | LONG),
    st.tuples(st.just("step"), WHICH, STARTS, SHORT | LONG),
    st.tuples(st.just("turn"), WHICH, STARTS, LONG, st.integers(0, 9)),
    st.tuples(st.just("turn"), WHICH, STARTS, LONG, st.just(0)),
    st.tuples(st.sampled_from(["commit", "abort", "drop"]), WHICH),
    st.tuples(st.just("attend"), WHICH, LAYER, SEEDS, BUDGETS),
    st.tuples(st.just("attend"), WHICH, LAYER, SEEDS, BUDGETS),
    st.tuples(st.just("truncate"), WHICH, SHARES),
    st.tuples(st.just("fork"), WHICH, SHARES),
    st.tuples(st.just("reindex"), WHICH, st.sampled_from([None, 0, 1]), st.sampled_from([False, True, True])),
)
OF_THE_STORE = st.one_of(
    st.tuples(st.just("create"), st.sampled_from([0, 0, 5])),
    st.tuples(st.just("run"), WORK, st.integers(1, 4)),
    st.tuples(st.just("fail"), WORK),
    st.tuples(st.sampled_from(["wait", "refuse"])),
    st.tuples(st.just("together"), LAYER, SEEDS),
)
PROMPTS = st.tuples(st.just("turn"), st.just(0), STARTS, st.sampled_from([64, 100]), st.just(0))
WATCHED = st.booleans()


def beginning_with_a_prompt(calls):
    """Schedules in which there is something to index from the start."""
    return st.tuples(PROMPTS, calls).map(lambda drawn: [drawn[0], *drawn[1]])


SCHEDULES = beginning_with_a_prompt(st.lists(OF_A_SEQUENCE | OF_A_SEQUENCE | OF_THE_STORE, min_size=15, max_size=40))
BUILDS = st.sampled_from([{"build": "commit"}, {"build": "overlap"}, {"build": "overlap", "wait": False}])
TURNS = st.sampled_from([
    {"turns": "extend"}, {"turns": "reindex"}, {"turns": "segment"}, {"turns": "segment", "reindex_drift": 1.05},
    {"turns": "extend", "codebook": "model"}, {"turns": "reindex", "codebook": "model"},
    {"turns": "extend", "codebook": "auto", "reindex_drift": 1.05}, {"turns": "reindex", "codebook": "auto"},
    {"kind": "page"}, {"kind": "sq4", "turns": "reindex"},
])  # fmt: skip
WORKERS = st.sampled_from([
    {"workers": "late"}, {"workers": "late"}, {"workers": "threads"}, {"workers": "threads", "threads": 3},
])  # fmt: skip


OF_NO_SEQUENCE = {"create", "run", "fail", "wait", "refuse", "together", "flush", "reopen"}


def perform(pipeline, call):
    """Make a call of a schedule; where it has to do with a sequence the first number says which, 0 the newest."""
    name, *arguments = call
    if name not in OF_NO_SEQUENCE:
        arguments[0] = pipeline.names[arguments[0] % len(pipeline.names)]
    getattr(pipeline, name)(*arguments)


def follow(pipeline, schedule, watched):
    """Do what a schedule says and compare after every call, by attention too if it is watched; return what was done."""
    done = []
    try:
        for call in schedule:
            perform(pipeline, call)
            pipeline.check()
            if watched:
                pipeline.attend(pipeline.names[0], len(done) % 2, len(done), 24)
            done.append(call)
        pipeline.finish()
        pipeline.check()
    finally:
        pipeline.store.close()
    return done


@settings(max_examples=50)
@given(SCHEDULES, BUILDS, TURNS, WORKERS, st.integers(0, 9), WATCHED)
def test_any_schedule_gives_what_was_told_and_dense_attention(schedule, build, turns, workers, seed, watched):
    assert follow(Pipeline(**build, **turns, **workers, seed=seed), schedule, watched) == schedule


@pytest.mark.slow
@settings(max_examples=1000)
@given(SCHEDULES, BUILDS, TURNS, WORKERS, st.integers(0, 9), WATCHED)
def test_a_thousand_schedules_do(schedule, build, turns, workers, seed, watched):
    assert follow(Pipeline(**build, **turns, **workers, seed=seed), schedule, watched) == schedule
