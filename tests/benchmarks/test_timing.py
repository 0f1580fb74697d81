import gc
import time
from contextlib import contextmanager

import pytest

from benchmarks.timing import Contender, interleave, medians


def contender(name, log, seconds=0.0):
    @contextmanager
    def scope():
        log.append(f"+{name}")
        time.sleep(0.02)
        yield
        log.append(f"-{name}")

    def run():
        log.append(name)
        time.sleep(seconds)

    return Contender(name, run, scope)


def test_contenders_take_turns_and_every_round_begins_with_another():
    log = []
    interleave([contender(name, log) for name in "abc"], rounds=4)
    order = [entry for entry in log if entry in "abc"]
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_each_run_is_inside_its_own_scope():
    log = []
    interleave([contender(name, log) for name in "ab"], rounds=1)
    assert log == ["+a", "a", "-a", "+b", "b", "-b"]


def test_scope_is_not_timed():
    seconds = interleave([contender("a", []), contender("b", [], seconds=0.03)], rounds=3)
    assert [len(figures) for figures in seconds.values()] == [3, 3]
    assert min(seconds["a"]) < 0.02
    assert min(seconds["b"]) >= 0.03


def test_garbage_is_not_collected_while_timing():
    seen = []
    interleave([Contender("a", lambda: seen.append(gc.isenabled()))], rounds=1)
    assert seen == [False]
    assert gc.isenabled()


def test_an_exception_goes_through_and_leaves_the_collector_on():
    with pytest.raises(ZeroDivisionError):
        interleave([Contender("a", lambda: 1 // 0)], rounds=1)
    assert gc.isenabled()


def test_progress_names_round_and_contender():
    lines = []
    interleave([Contender("a", int), Contender("b", int)], rounds=2, tell=lines.append)
    assert lines == ["round 1 of 2: a", "round 1 of 2: b", "round 2 of 2: b", "round 2 of 2: a"]


def test_names_must_differ_and_rounds_be_positive():
    with pytest.raises(ValueError, match="names"):
        interleave([Contender("a", int), Contender("a", int)], rounds=1)
    with pytest.raises(ValueError, match="rounds"):
        interleave([Contender("a", int)], rounds=0)


def test_medians():
    assert medians({"a": [3.0, 1.0, 100.0], "b": [1.0, 2.0]}) == {"a": 3.0, "b": 1.5}
