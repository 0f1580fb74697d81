"""A child forked by a process that has a store open: an error and not its end, and the parent's store is unharmed."""

import json
import os
import sys

import pytest

from kvstore import ForkedStoreError, KVStore
from tests.kvstore.faults.workload import SCHEMA, assert_sound, found, perform, run, small
from tests.storage.processes import run_python

ASKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from kvstore import ForkedStoreError, KVStore
from tests.builders import make_query
from tests.kvstore.faults.workload import SCHEMA, perform, small
store, q = KVStore.open(sys.argv[1], SCHEMA, small()), make_query(SCHEMA, 1)
perform(store, ("step", "a", 0, 300))
seq = store["a"]
seq.attend(0, q)
for ask in (lambda: seq.attend(0, q), lambda: seq.topk(0, 0, q[0], 5), seq.reindex):
    pid = os.fork()
    if pid == 0:
        try:
            ask()
        except ForkedStoreError:
            os._exit(7)
        os._exit(8)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert seq.attend(0, q).isfinite().all()
store.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere OpenMP survives a fork")
def test_a_forked_child_that_asks_is_told_and_not_ended(tmp_path):
    assert run_python(ASKED, tmp_path / "s").split() == ["7", "7", "7"]


def in_child(work):
    """Do something in a forked child; its exit status: 7 for `ForkedStoreError`, 0 if all was well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except ForkedStoreError:
            status = 7
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("what", ["flush", "checkpoint", "vacuum", "check", "close"])
def test_a_forked_child_cannot_write_and_does_not_say_that_the_store_was_closed(tmp_path, what):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 50))
        store.flush()
        assert in_child(getattr(store, what)) == 7
        assert json.loads((tmp_path / "s" / "manifest.json").read_text())["clean"] is False
        perform(store, ("step", "a", 50, 5))
        assert_sound(store)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) == {"a": run(0, 55)}
