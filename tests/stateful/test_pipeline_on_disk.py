"""Random schedules in a directory, with less memory than rows."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stateful.pipeline_on_disk import PipelineOnDisk
from tests.stateful.test_pipeline_schedules import (
    BUDGETS,
    BUILDS,
    LAYER,
    OF_A_SEQUENCE,
    OF_THE_STORE,
    SEEDS,
    TURNS,
    WHICH,
    WORKERS,
    perform,
)

LONG_STEPS = st.tuples(st.just("step"), WHICH, st.integers(0, 399), st.sampled_from([100, 150, 200]))
ON_DISK = st.one_of(
    st.tuples(st.sampled_from(["flush", "reopen"])),
    st.tuples(st.just("unload"), WHICH),
    st.tuples(st.just("attend_while_a_read_fails"), WHICH, LAYER, SEEDS, BUDGETS),
)
SCHEDULES = st.lists(OF_A_SEQUENCE | OF_THE_STORE | LONG_STEPS | LONG_STEPS | ON_DISK, min_size=10, max_size=30)


def follow(schedule, how):
    """Do what a schedule says in a new directory and compare after every call; return what was done."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline, done = PipelineOnDisk(Path(folder) / "s", **how), []
        try:
            for call in schedule:
                perform(pipeline, call)
                pipeline.check()
                done.append(call)
            pipeline.finish()
            pipeline.check()
            assert pipeline.store.check() == []
        finally:
            pipeline.store.close()
    return done


@settings(max_examples=15)
@given(SCHEDULES, BUILDS, TURNS, WORKERS, st.integers(0, 9))
def test_any_schedule_gives_what_was_told_and_dense_attention(schedule, build, turns, workers, seed):
    assert follow(schedule, {**build, **turns, **workers, "seed": seed}) == schedule


@pytest.mark.slow
@settings(max_examples=300)
@given(SCHEDULES, BUILDS, TURNS, WORKERS, st.integers(0, 9))
def test_three_hundred_schedules_do(schedule, build, turns, workers, seed):
    assert follow(schedule, {**build, **turns, **workers, "seed": seed}) == schedule
