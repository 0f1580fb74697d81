"""Memory runs out at each of the places where it is taken: nothing has changed, and the next try works."""

import pytest
import torch

from kvstore import KVStore, KVStoreError, stored_indexes
from kvstore.errors import HeapFullError
from kvstore.heap import Heap
from kvstore.storage.lmdb_file import LmdbFile
from kvstore.table import Table
from kvstore.table_indexes import TableIndexes
from tests.kvstore.faults.failing import Faults, failing
from tests.kvstore.faults.workload import SCHEMA, assert_sound, foresee, found, perform, small

OPS = {
    "append": ("step", "a", 100, 45),
    "begin": ("step", "c", 300, 45),
    "append to a fork": ("step", "twin", 300, 5),
    "fork": ("fork", "a", "c"),
    "bring back": ("read", "b"),
    "append to what is on disk": ("step", "b", 160, 20),
    "load": ("read", "d"),
    "unload": ("unload", "a"),
    "truncate": ("truncate", "a", 50),
    "flush": ("flush",),
    "checkpoint": ("checkpoint",),
}
PLACES = {
    "blocks": (Heap, "allocate", HeapFullError),
    "tensors": (torch, "empty", MemoryError),
    "records": (LmdbFile, "read", MemoryError),
    "indexes": (stored_indexes, "decode_index", MemoryError),
    "tables": (Table, "fork", MemoryError),
    "forks of indexes": (TableIndexes, "fork", MemoryError),
}
MUST_FAIL = {(what, "blocks") for what in ("append", "begin", "append to a fork", "bring back", "load")}
START = [("step", "a", 0, 100), ("step", "b", 100, 60), ("step", "d", 400, 70), ("fork", "a", "twin"), ("flush",)]


def prepared(path):
    """A store with sequences in memory, one that was taken out of it, and one that was never asked for."""
    model = {}
    with KVStore.open(path, SCHEMA, small()) as store:
        for op in START:
            perform(store, op)
            model = foresee(model, op)
    store = KVStore.open(path, SCHEMA, small())
    kept = [store[name] for name in ("a", "b", "twin")]
    store.unload("b")
    return store, model, kept


def do_with_little_memory(store, op, place, n):
    """Do an operation whose n-th call for memory fails; returns whether it failed."""
    module, name, error = PLACES[place]
    faults = Faults(n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, failing(getattr(module, name), name, faults, lambda: error("made to fail")))
        try:
            perform(store, op)
        except (KVStoreError, MemoryError):
            assert faults.failed
            return True
    assert not faults.failed, "nobody has heard of it"
    return False


def check_memory(path, what, place):
    store, model, kept = prepared(path)
    op, n_failed = OPS[what], 0
    while do_with_little_memory(store, op, place, n_failed + 1):
        n_failed += 1
        store._check()
        now = found(store)
        begun = {**model, op[1]: []} if op[0] == "step" and op[1] not in model else model
        after = foresee(model, op) if op[0] == "step" else model  # rows are committed before the index is added to
        assert now in (model, begun, after), f"{op} failed and left {now}"
        store._check()
        if now == after != model:
            break
        for name in set(begun) - set(model):
            store.drop(name)
        if what == "load":
            break  # it is in memory now
        if op[1:2] == ("b",):
            store.unload("b")
        assert n_failed < 100
    model = foresee(model, op) if what != "load" else model
    assert found(store) == model
    assert [seq.name for seq in kept] == ["a", "b", "twin"]
    assert_sound(store)
    store.close()
    with KVStore.open(path, SCHEMA, small()) as store:
        assert found(store) == model
        assert_sound(store)
    return n_failed


@pytest.mark.parametrize("place", ["blocks", "tensors"])
@pytest.mark.parametrize("what", list(OPS))
def test_memory_that_runs_out_changes_nothing(tmp_path, what, place):
    n_failed = check_memory(tmp_path / "s", what, place)
    assert n_failed > 0 or (what, place) not in MUST_FAIL
