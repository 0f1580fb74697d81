"""Other threads and processes that read, are killed, or hold on; and forked children."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from kvstore.errors import KVStoreError, StorageError, StoreClosedError
from kvstore.storage.key import RecordKey
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.storage.builders import SETTINGS, content, opaque
from tests.storage.processes import ROOT, run_python

READER = """
import sys
from kvstore.storage.lmdb_tier import LmdbTier
from tests.storage.builders import content, opaque
tier = LmdbTier(sys.argv[1], readonly=True, live=True)
for line in sys.stdin:
    pair = tier.get_many([opaque(0).key, opaque(1).key])
    whole = [content(record) == content(opaque(i, 5000, seed=int(line))) for i, record in enumerate(pair)]
    print(tier.n_records, *whole, flush=True)
"""
HOLDER = """
import sys
from kvstore.storage.lmdb_tier import LmdbTier
tier = LmdbTier(sys.argv[1], readonly=True, live=True)
with tier._file._reading() as txn:
    print("reading", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def children():
    """Starts children; ends those that are left."""
    started = []

    def start(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def ask(child, seed):
    child.stdin.write(f"{seed}\n")
    child.stdin.flush()
    return child.stdout.readline().split()


def put_pair(tier, seed):
    tier.put_many([opaque(0, 5000, seed=seed), opaque(1, 5000, seed=seed)])
    tier.flush()


def test_processes_read_what_is_written_and_follow_a_vacuum(tmp_path, children):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        put_pair(tier, 0)
        readers = [children(READER, tmp_path) for _ in range(2)]
        for seed in range(1, 4):
            for reader in readers:
                assert ask(reader, seed - 1) == ["2", "True", "True"]
            tier.vacuum()
            put_pair(tier, seed)
        for reader in readers:
            assert ask(reader, 3) == ["2", "True", "True"]
        assert tier._file.path.name == "spill-000004.mdb"


def test_readers_that_were_killed_leave_their_places(tmp_path, children):
    settings = SpillSettings(8 * MIB, max_readers=3)
    with LmdbTier(tmp_path, settings) as tier:
        put_pair(tier, 0)
        for _ in range(3):
            holders = [children(HOLDER, tmp_path) for _ in range(3)]
            for holder in holders:
                assert holder.stdout.readline() == "reading\n"
            with pytest.raises(StorageError, match="as many readers as max_readers allows"):
                tier.get_many([opaque().key])
            for holder in holders:
                holder.send_signal(signal.SIGKILL)
                holder.wait()
            assert tier.get_many([opaque(0).key]) == [opaque(0, 5000, seed=0)]
        tier._check()


def test_a_reader_that_was_killed_does_not_keep_old_pages(tmp_path, children):
    with LmdbTier(tmp_path, SpillSettings(2 * MIB)) as tier:
        put_pair(tier, 0)
        holder = children(HOLDER, tmp_path)
        assert holder.stdout.readline() == "reading\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        for seed in range(100):
            tier.put_many([opaque(0, 100_000, seed=seed)])
            tier.flush()
        tier._check()


def test_a_reader_sees_its_moment_while_others_write(tmp_path, children):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        put_pair(tier, 0)
        holder = children(HOLDER, tmp_path)
        assert holder.stdout.readline() == "reading\n"
        for seed in range(1, 20):
            put_pair(tier, seed)
        tier.vacuum()
        put_pair(tier, 20)
        assert [content(record) for record in tier.get_many([opaque(0).key])] == [content(opaque(0, 5000, seed=20))]
        holder.stdin.close()
        assert holder.wait() == 0


def test_a_reader_that_finds_no_writer_verifies(tmp_path):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        put_pair(tier, 0)
    code = READER.replace(", live=True", "").replace("for line in sys.stdin", "for line in ['0']")
    assert run_python(code, tmp_path).split() == ["2", "True", "True"]


# ---- close while others work ----


@pytest.mark.parametrize("way", ["close", "vacuum"])
def test_closing_and_vacuuming_while_threads_read_and_write(tmp_path, way):
    tier = LmdbTier(tmp_path, SETTINGS)
    put_pair(tier, 0)
    wrong, stop, going = [], threading.Event(), threading.Barrier(4)

    def work(call):
        going.wait(60)
        try:
            while not stop.is_set():
                call()
        except StoreClosedError:
            pass
        except BaseException as error:
            wrong.append(error)

    def read():
        a, b = tier.get_many([opaque(0).key, opaque(1).key])
        assert content(a)[:10] == content(b)[:10]

    calls = [read, lambda: list(tier.iterate()), lambda: tier.put_many([opaque(5, 9000)])]
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    going.wait(60)
    for _ in range(1 if way == "close" else 10):
        getattr(tier, way)()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    tier.close()
    with LmdbTier(tmp_path, SETTINGS) as again:
        assert again.get_many([opaque(0).key]) == [opaque(0, 5000, seed=0)]
        again._check()


def test_closing_writes_what_waits(tmp_path):
    for i in range(20):
        with LmdbTier(tmp_path, SETTINGS) as tier:
            tier.put_many([opaque(i, 50_000)])
    with LmdbTier(tmp_path, SETTINGS) as tier:
        assert tier.get_many(tier.iterate()) == [opaque(i, 50_000) for i in range(20)]


def test_an_error_of_the_writer_is_raised_by_close_and_all_is_given_up(tmp_path):
    def fail(point):
        if point == "spill.before_commit":
            raise StorageError("made to fail")

    tier = LmdbTier(tmp_path, SETTINGS, hook=fail)
    tier.put_many([opaque()])
    with pytest.raises(StorageError, match="made to fail"):
        tier.close()
    assert tier.closed
    with LmdbTier(tmp_path, SETTINGS) as again:
        assert again.n_records == 0


def test_a_batch_is_never_seen_in_part_between_queue_and_file(tmp_path, monkeypatch):
    """One of two records waits, the other is in the file; meanwhile a batch of both is accepted."""
    with LmdbTier(tmp_path, SETTINGS) as tier:
        put_pair(tier, 0)
        tier._gate._waiting += 1  # keeps the writer out
        tier.put_many([opaque(0, 5000, seed=1)])
        tier._gate._waiting -= 1
        real, threads = tier._read_file, []

        def read_late(keys):
            threads.append(threading.Thread(target=put_pair, args=(tier, 2)))
            threads[-1].start()
            threads[-1].join(0.2)
            return real(keys)

        with monkeypatch.context() as patch:
            patch.setattr(tier, "_read_file", read_late)
            found = tier.get_many([opaque(0).key, opaque(1).key])
        assert found in [[opaque(0, 5000, seed=1), opaque(1, 5000, seed=0)], [opaque(i, 5000, seed=2) for i in (0, 1)]]
        threads[-1].join(60)
        assert tier.get_many([opaque(1).key]) == [opaque(1, 5000, seed=2)]


# ---- fork ----


def test_a_forked_child_is_told_and_harms_nobody(tmp_path):
    code = """
import os, sys
from kvstore.errors import ForkedStoreError
from kvstore.storage.lmdb_tier import LmdbTier
from tests.storage.builders import SETTINGS, opaque
tier = LmdbTier(sys.argv[1], SETTINGS)
tier.put_many([opaque(0)])
tier.flush()
pid = os.fork()
if pid == 0:
    told = 0
    for call in (tier.flush, tier.vacuum, lambda: tier.get_many([opaque(0).key]), lambda: tier.put_many([opaque(1)])):
        try:
            call()
        except ForkedStoreError:
            told += 1
    tier.close()  # does nothing
    del tier
    os._exit(0 if told == 4 else 1)
assert os.waitpid(pid, 0)[1] == 0
tier.put_many([opaque(1)])
assert tier.get_many([opaque(0).key, opaque(1).key]) == [opaque(0), opaque(1)]
tier._check()
tier.close()
print("well")
"""
    assert run_python(code, tmp_path) == "well\n"


def test_a_process_that_never_closes_ends_and_keeps_what_was_flushed(tmp_path):
    code = """
import sys
from kvstore.storage.lmdb_tier import LmdbTier
from tests.storage.builders import SETTINGS, opaque
tier = LmdbTier(sys.argv[1], SETTINGS)
tier.put_many([opaque(0)])
tier.flush()
"""
    run_python(code, tmp_path)
    with LmdbTier(tmp_path, SETTINGS) as tier:
        assert tier.get_many([opaque(0).key]) == [opaque(0)]


def test_a_spawned_child_can_open_what_it_was_told(tmp_path):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        put_pair(tier, 0)
        with pytest.raises(KVStoreError, match="send its path"):
            tier.__reduce_ex__(2)
        assert str(os.getpid()) not in run_python(READER.replace("sys.stdin", "['0']"), tmp_path)


def test_memory_stays_flat_over_many_batches(tmp_path):
    """With a short queue: batches that wait for a slow disk are memory that settings allow, not what is looked for."""
    code = """
import gc, sys
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.spill_settings import SpillSettings
from tests.storage.builders import opaque
def resident():
    gc.collect()
    return [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")][0]
with LmdbTier(sys.argv[1], SpillSettings(8 << 20, queue_bytes=256 << 10)) as tier:
    for i in range(4500):
        tier.write([opaque(i % 10, 3000)], [opaque((i + 5) % 10).key])
        tier.get_many([opaque(i % 10).key])
        if i == 1500:  # by then the allocator has what it needs
            tier.flush()
            before = resident()
    tier.flush()
    print(resident() - before)
"""
    assert int(run_python(code, tmp_path)) < 4096  # KiB


def test_keys_are_read_by_everybody_alike(tmp_path):
    """Stable across processes: nothing in a key depends on the seed of hashes."""
    code = "from tests.storage.builders import opaque; print(opaque(7).key.pack().hex())"
    assert RecordKey.unpack(bytes.fromhex(run_python(code).strip())) == opaque(7).key
