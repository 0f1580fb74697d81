"""Each call of the system fails, once or for a while: the error is heard, memory is right, and the next flush helps."""

import contextlib

import lmdb
import pytest

from kvstore import KVStore, KVStoreError
from tests.kvstore.faults.failing import FOR_EVER, OPS, Faults, disk_that_fails
from tests.kvstore.faults.workload import SCHEMA, assert_sound, foresee, found, perform, small

HEARD = (KVStoreError, MemoryError)


def open_store(path, faults):
    """Open a store; where that fails it is tried again on a disk that works."""
    try:
        return KVStore.open(path, SCHEMA, small())
    except KVStoreError:
        faults.heal()
        return KVStore.open(path, SCHEMA, small())


def do(store, op, model, faults):
    """Do an operation; where it fails, see that memory is right on a disk that works. Returns what the store holds."""
    after = foresee(model, op)
    try:
        perform(store, op)
    except HEARD:
        faults.heal()
        now = found(store)
        begun = {**model, op[1]: []} if op[0] == "step" and op[1] not in model else model
        assert now in (model, begun, after), f"{op} failed and left {now} of {model}"
        return now
    return after


def live(path, faults):
    """Go through the operations with a disk that fails, then see that memory and disk are right."""
    with disk_that_fails(faults):
        store, model = open_store(path, faults), {}
        for op in OPS:
            model = do(store, op, model, faults)
        faults.heal()
        with contextlib.suppress(*HEARD):
            store.flush()  # it may bring news of a write that has failed
        store.flush()
        assert found(store) == model
        assert_sound(store)
        store.close()
    with KVStore.open(path, SCHEMA, small()) as store:
        assert found(store) == model
        assert_sound(store)


CASES = [("one", "disk"), ("all after it", "disk"), ("one", "memory")]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("one", "damage"), ("all after it", "memory"))]


@pytest.mark.parametrize(("calls", "error"), [*CASES, *SLOW])
def test_the_nth_call_that_fails_is_an_error_and_the_next_flush_saves_all(tmp_path, calls, error):
    within = {"disk": lmdb.DiskError, "memory": MemoryError, "damage": lmdb.CorruptedError}[error]
    for n in range(1, 1000):
        faults = Faults(n, 1 if calls == "one" else FOR_EVER, within)
        live(tmp_path / str(n), faults)
        if not faults.failed:
            break
    assert 50 < n < 999
