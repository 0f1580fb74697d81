"""Closing, or opening, fails at each of its calls: what was flushed is there, and the directory can be opened again."""

import pytest

from kvstore import KVStore, KVStoreError
from tests.kvstore.faults.failing import OPS, Faults, disk_that_fails
from tests.kvstore.faults.workload import (
    SCHEMA,
    assert_is_one_of,
    assert_sound,
    found,
    perform,
    small,
    states_since_flush,
    steps_of,
)


def failures(tmp_path):
    """Yield a directory and a disk whose n-th call fails, for each n until there are no more calls."""
    for n in range(1, 1000):
        faults = Faults()
        yield tmp_path / str(n), faults, n
        if not faults.failed:
            break
    assert 5 < n < 999


def test_the_nth_call_of_closing_that_fails_is_an_error_and_what_was_flushed_is_there(tmp_path):
    steps = steps_of(OPS)
    for path, faults, n in failures(tmp_path):
        store = KVStore.open(path, SCHEMA, small())
        for op in OPS:
            perform(store, op)
        store._persistence._directory.tier.flush()
        possible = states_since_flush({}, steps, len(OPS), len(OPS))
        with disk_that_fails(faults):
            faults.first = faults.last = n
            try:
                store.close()
                possible = possible[-1:]  # a write that failed was tried again
            except KVStoreError:
                assert faults.failed
        with KVStore.open(path, SCHEMA, small()) as store:
            assert_is_one_of(found(store), possible)
            assert_sound(store)


@pytest.mark.parametrize("closed", [True, False])
def test_the_nth_call_of_opening_that_fails_is_an_error_and_the_next_opening_finds_all(tmp_path, closed):
    for path, faults, n in failures(tmp_path):
        with KVStore.open(path, SCHEMA, small()) as store:
            for op in OPS:
                perform(store, op)
            store.flush()
            model = found(store)
            if not closed:
                manifest = (path / "manifest.json").read_bytes()
        if not closed:
            (path / "manifest.json").write_bytes(manifest)  # as if the process had been killed
        with disk_that_fails(faults):
            faults.first = faults.last = n
            try:
                KVStore.open(path, SCHEMA, small()).close()
            except KVStoreError:
                assert faults.failed
        with KVStore.open(path, SCHEMA, small()) as store:
            assert found(store) == model
            assert_sound(store)
