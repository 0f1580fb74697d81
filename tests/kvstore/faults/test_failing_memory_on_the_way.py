"""Memory runs out half-way through a fork, or while a sequence comes back from disk: nothing of it stays."""

import pytest

from kvstore import UnsupportedFormatError, stored_indexes
from tests.kvstore.faults.test_failing_memory import check_memory, prepared
from tests.kvstore.faults.workload import found

HALF_WAY = [
    ("fork", "tables"),
    ("fork", "forks of indexes"),
    ("bring back", "records"),
    ("bring back", "indexes"),
    ("append to what is on disk", "records"),
    ("append to what is on disk", "indexes"),
    ("load", "records"),
    ("load", "indexes"),
]


@pytest.mark.parametrize(("what", "place"), HALF_WAY)
def test_memory_that_runs_out_half_way_leaves_nothing_behind(tmp_path, what, place):
    assert check_memory(tmp_path / "s", what, place) > 0


def test_an_index_of_a_newer_version_is_built_again_and_nothing_stays_behind(tmp_path, monkeypatch):
    def newer(*_):
        raise UnsupportedFormatError("made up")

    store, model, _ = prepared(tmp_path / "s")
    monkeypatch.setattr(stored_indexes, "decode_index", newer)
    assert found(store) == model
    store._check()
    store.close()
