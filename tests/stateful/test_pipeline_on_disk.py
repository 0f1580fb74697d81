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
    WATCHED,
    WHICH,
    WORKERS,
    beginning_with_a_prompt,
    follow,
)

LONG_STEPS = st.tuples(st.just("step"), WHICH, st.integers(0, 399), st.sampled_from([100, 150, 200]))
ON_DISK = st.one_of(
    st.tuples(st.sampled_from(["flush", "reopen"])),
    st.tuples(st.just("unload"), WHICH),
    st.tuples(st.just("attend_while_a_read_fails"), WHICH, LAYER, SEEDS, BUDGETS),
)
CALLS = OF_A_SEQUENCE | OF_THE_STORE | LONG_STEPS | LONG_STEPS | ON_DISK
SCHEDULES = beginning_with_a_prompt(st.lists(CALLS, min_size=10, max_size=30))


def follow_on_disk(schedule, watched, **how):
    """Do what a schedule says in a new directory; return what was done."""
    with tempfile.TemporaryDirectory() as folder:
        return follow(PipelineOnDisk(Path(folder) / "s", **how), schedule, watched)


@settings(max_examples=15)
@given(SCHEDULES, BUILDS, TURNS, WORKERS, st.integers(0, 9), WATCHED)
def test_any_schedule_gives_what_was_told_and_dense_attention(schedule, build, turns, workers, seed, watched):
    assert follow_on_disk(schedule, watched, **build, **turns, **workers, seed=seed) == schedule


@pytest.mark.slow
@settings(max_examples=150)
@given(SCHEDULES, BUILDS, TURNS, WORKERS, st.integers(0, 9), WATCHED)
def test_many_more_schedules_do(schedule, build, turns, workers, seed, watched):
    assert follow_on_disk(schedule, watched, **build, **turns, **workers, seed=seed) == schedule
