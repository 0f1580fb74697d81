"""Other processes beside the one that writes: readers that come, read and are killed, and a second writer."""

import random
import signal
import subprocess
import sys

import pytest

from kvstore import KVStore, StoreLockedError
from tests.kvstore.faults.workload import SCHEMA, assert_sound, found, perform, run, small
from tests.storage.processes import ROOT, run_python

FIRST = {"a": 0, "b": 200, "c": 350}
READER = """
import sys
from kvstore import KVStore, KVStoreError
from tests.kvstore.faults.test_other_processes import FIRST
from tests.kvstore.faults.workload import run, tokens_of
store, n_right = KVStore.open(sys.argv[1], readonly=True), 0
print("ready", flush=True)
while True:
    for name in store:
        try:
            tokens = tokens_of(store[name])
        except KVStoreError:  # written anew since the catalog was read
            continue
        assert tokens == run(FIRST[name], len(tokens)), f"{name} is {tokens}"
        n_right += len(tokens) > 0
    print(n_right, flush=True)
    if sys.argv[2] == "again":
        store.close()
        store = KVStore.open(sys.argv[1], readonly=True)
"""


def start_reader(path, how):
    """A process that reads one store for ever, or opens it again and again."""
    command = [sys.executable, "-W", "ignore", "-c", READER, str(path), how]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert reader.stdout.readline() == "ready\n", reader.stderr.read()
    return reader


def write(store, lengths, chance):
    """One more step, flush or vacuum."""
    name = chance.choice(list(FIRST))
    n = chance.choice([1, 16, 40])
    perform(store, ("step", name, FIRST[name] + lengths[name], n))
    lengths[name] += n
    store.flush()
    if chance.random() < 0.2:
        store.vacuum()


def test_readers_in_other_processes_see_whole_sequences_and_may_be_killed(tmp_path):
    path, chance, lengths = tmp_path / "s", random.Random(1), dict.fromkeys(FIRST, 0)
    with KVStore.open(path, SCHEMA, small()) as store:
        for _ in range(5):
            write(store, lengths, chance)
        readers = [start_reader(path, how) for how in ("once", "again")]
        for _ in range(25):
            write(store, lengths, chance)
        first, second = readers
        seen = [int(reader.stdout.readline()) for reader in readers]
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -9
        for _ in range(25):
            write(store, lengths, chance)
        seen.append(int(second.stdout.readline()))
        assert second.poll() is None, second.stderr.read()
        second.kill()
        second.wait()
        for reader in readers:
            reader.stdout.close()
            reader.stderr.close()
        assert min(seen) > 0
        model = {name: run(FIRST[name], n) for name, n in lengths.items()}
        assert found(store) == model
        assert_sound(store)
    with KVStore.open(path, SCHEMA, small()) as store:
        assert found(store) == model
        assert_sound(store)


SECOND = """
import sys
from kvstore import KVStore, StoreLockedError
from tests.kvstore.faults.workload import SCHEMA, found, small
try:
    KVStore.open(sys.argv[1], SCHEMA, small())
except StoreLockedError as error:
    print(error)
with KVStore.open(sys.argv[1], readonly=True) as store:
    print(found(store) == {"a": list(range(50))})
"""


def test_a_second_writer_in_another_process_or_this_one_is_refused_and_harms_nothing(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 50))
        store.flush()
        said = run_python(SECOND, tmp_path / "s").splitlines()
        assert "is open to write in process" in said[0]
        assert said[1] == "True"
        for way in ({"schema": SCHEMA, "config": small()}, {"readonly": True}):
            with pytest.raises(StoreLockedError):
                KVStore.open(tmp_path / "s", **way)
        perform(store, ("step", "a", 50, 10))
        assert_sound(store)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) == {"a": run(0, 60)}
