"""Killed at random and at named points: each sequence is as it was at some moment since it was last flushed."""

import json
import os
import random
import subprocess
import sys

import pytest

from kvstore import KVStore
from tests.kvstore.faults.workload import SCHEMA, assert_is_one_of, assert_sound, found, small, states_since_flush, walk
from tests.kvstore.faults.zygote import MOST_OPS
from tests.storage.processes import ROOT

POINTS = [
    ("spill.created", 1),
    ("spill.renamed", 1),
    ("file.written", 1),
    ("file.renamed", 1),
    ("file.written", 2),
    ("file.renamed", 2),
    ("spill.put", 1),
    ("spill.put", 20),
    ("spill.put", 101),
    ("spill.before_commit", 2),
    ("spill.before_commit", 15),
    ("spill.committed", 1),
    ("spill.committed", 14),
    ("spill.copied", 1),
    ("spill.renamed", 2),
    ("spill.moved", 2),
]


@pytest.fixture(scope="module")
def kill():
    """A function that has a child walk through a store until it is killed, and returns how far it got."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.kvstore.faults.zygote"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}, **pipes
    ) as zygote:

        def killed(**job):
            zygote.stdin.write(json.dumps(job) + "\n")
            zygote.stdin.flush()
            return json.loads(zygote.stdout.readline())

        yield killed
        zygote.stdin.close()


def killed_once(kill, path, start, seed, **how):
    """Kill a walk, open what is left, and return what is there."""
    end = kill(path=str(path), seed=seed, start=start, **how)
    assert (end["signal"], end["errors"]) == (9, [])
    steps = walk(seed, MOST_OPS, start)
    with KVStore.open(path, SCHEMA, small()) as store:
        model = found(store)
        assert_is_one_of(model, states_since_flush(start, steps, end["done"], end["begun"]))
        assert_sound(store)
    return model


@pytest.mark.parametrize(("point", "n"), POINTS)
def test_killed_at_a_point_a_store_is_as_it_was_at_some_moment_since_its_last_flush(kill, tmp_path, point, n):
    model = killed_once(kill, tmp_path / "s", {}, seed=n, point=point, n=n)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) == model


@pytest.mark.parametrize("trial", [*range(5), *(pytest.param(i, marks=pytest.mark.slow) for i in range(5, 200))])
def test_killed_at_any_moment_and_again_a_store_is_as_it_was_since_its_last_flush(kill, tmp_path, trial):
    chance, model = random.Random(trial), {}
    for _ in range(3):
        how = {"ops": chance.randint(1, 80), "seconds": chance.uniform(0, 0.004)}
        model = killed_once(kill, tmp_path / "s", model, chance.randrange(1 << 30), **how)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) == model
