"""A second thread, or a forked child, that uses a store: right answers or one error; no crash, no wrong rows."""

import pytest

from kvstore import KVStore
from tests.kvstore.faults.test_forked import in_child
from tests.kvstore.faults.workload import SCHEMA, found, perform, run, small
from tests.storage.processes import run_python

CLOSE = """
import random, sys, threading, time
sys.setswitchinterval(1e-5)
from kvstore import IndexConfig, KVStore, KVStoreError, Schema, StoreConfig
from tests.builders import append, make_query, make_rows, same_bits
schema = Schema(n_layers=2, n_q_heads=8, n_kv_heads=4, head_dim=64, block_tokens=16)
rows, others, q = make_rows(schema, 4000, 1), make_rows(schema, 4000, 2), make_query(schema, 1)
chance, right = random.Random(1), None
for _ in range(12):
    store = KVStore(schema, StoreConfig(index=IndexConfig("flat"), dense_rows=10))
    seq = store.create("a")
    append(seq, rows)
    right = seq.attend(0, q, budget=None) if right is None else right
    def ask():
        try:
            while True:
                assert same_bits(seq.attend(0, q, budget=None), right)
        except KVStoreError:
            pass
        except BaseException as error:
            wrong.append(error)
    wrong, thread = [], threading.Thread(target=ask)
    thread.start()
    time.sleep(chance.uniform(0, 0.02))
    if sys.argv[1] == "close":
        store.close()
    else:
        store.drop("a")
        append(store.create("b"), others)
    thread.join()
    assert not wrong, wrong
"""


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_sequence_that_is_taken_away_while_another_thread_reads_it_is_an_error_there(how):
    assert run_python(CLOSE, how) == ""  # a signal fails it


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("what", ["step", "create", "truncate", "fork", "read", "drop"])
def test_a_forked_child_cannot_use_the_memory_of_a_store(tmp_path, what, durable):
    config = small()
    with KVStore.open(tmp_path / "s", SCHEMA, config) if durable else KVStore(SCHEMA, config) as store:
        perform(store, ("step", "a", 0, 40))
        seq = store["a"]
        calls = {
            "step": seq.begin_step,
            "create": lambda: store.create("b"),
            "truncate": lambda: seq.truncate(5),
            "fork": lambda: seq.fork("b"),
            "read": lambda: seq.read(0, 0, 1),
            "drop": lambda: store.drop("a"),
        }
        assert in_child(calls[what]) == 7
        assert found(store) == {"a": run(0, 40)}


STEPS = """
import sys, threading
sys.setswitchinterval(1e-5)
from kvstore import KVStore
from tests.builders import append, cut, make_rows, same_bits
from tests.kvstore.faults.workload import SCHEMA, small
store = KVStore.open(sys.argv[1], SCHEMA, small())
rows = [make_rows(SCHEMA, 300, i) for i in range(4)]
def work(i):
    seq = store.create(str(i))
    for at in range(0, 300, 10):
        append(seq, cut(rows[i], at, at + 10))
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for i in range(4):
    for layer in range(SCHEMA.n_layers):
        assert same_bits(store[str(i)].read(layer)[0], rows[i][layer][0])
store._check()
store.close()
"""


def test_threads_with_a_sequence_each_append_beside_each_other(tmp_path):
    assert run_python(STEPS, tmp_path / "s") == ""
