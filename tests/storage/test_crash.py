"""Killed at named points and at random: what was done is there, what was begun is there whole or not at all."""

import random
import subprocess
import sys
import threading

import pytest

from kvstore.storage.lmdb_tier import LmdbTier
from tests.storage.crash_child import COUNTER, SETTINGS, expected
from tests.storage.processes import ROOT

POINTS = [
    ("spill.created", 1),
    ("spill.renamed", 1),
    ("spill.put", 1),
    ("spill.put", 13),
    ("spill.before_commit", 3),
    ("spill.committed", 4),
    ("spill.copied", 1),
    ("spill.renamed", 2),
    ("spill.moved", 2),
]


def run_until_killed(folder, *point, after_seconds=None):
    """Run the child; return the last batch that it had done and the last that it had begun."""
    command = [sys.executable, "-m", "tests.storage.crash_child", str(folder), *map(str, point)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    timer = threading.Timer(120 if after_seconds is None else after_seconds, child.kill)
    timer.start()
    out, err = child.communicate()
    timer.cancel()
    assert child.returncode == -9, err.decode()
    told = [line.split() for line in out.decode().splitlines()]
    return [max((int(i) for what, i in told if what == which), default=0) for which in ("done", "begin")]


def check_state(folder, done, begun):
    """Open what is left, as the last batch done, or the one that was under way; return which."""
    with LmdbTier(folder, SETTINGS) as tier:
        tier._check()
        [last] = tier.get_many([COUNTER])
        i = int(bytes(last.payload)) if last else 0
        assert done <= i <= max(begun, done)
        records = expected(i) if i else []
        assert sorted(tier.iterate()) == sorted(record.key for record in records)
        assert tier.get_many(record.key for record in records) == records
        assert len([path for path in folder.iterdir() if path.suffix == ".mdb"]) == 1
        return i


@pytest.mark.parametrize(("point", "n"), POINTS)
def test_killed_at_a_point(tmp_path, point, n):
    check_state(tmp_path, *run_until_killed(tmp_path, point, n))


def killed_at_random(folder, trials, seed):
    """Kill, look, go on in the same folder; return the batch that was found each time."""
    chance, found = random.Random(seed), [0]
    for _ in range(trials):
        done, begun = run_until_killed(folder, after_seconds=chance.uniform(0.15, 0.6))
        found.append(check_state(folder, max(done, found[-1]), begun))
    return found[1:]


def test_killed_at_random_times(tmp_path):
    found = killed_at_random(tmp_path, 5, seed=1)
    assert len(found) == 5
    assert found == sorted(found)  # what was written is never lost again


@pytest.mark.slow
def test_killed_at_random_times_200_times(tmp_path):
    assert killed_at_random(tmp_path, 200, seed=2)[-1] > 200
