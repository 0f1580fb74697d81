"""Every call, while the writer's thread is late or has failed: it ends, rows are right, the error is heard once."""

import threading

import lmdb
import pytest

from kvstore import KVStore, StorageError
from kvstore.storage.lmdb_file import LmdbFile
from tests.builders import make_query
from tests.kvstore.callers import LIMIT_S, Caller
from tests.kvstore.faults.workload import SCHEMA, assert_sound, found, perform, run, small

CALLS = {
    "attend": lambda store: store["a"].attend(1, make_query(SCHEMA, 0)),
    "topk": lambda store: store.topk(1, 0, make_query(SCHEMA, 0), 5, sequence="a"),
    "read": lambda store: perform(store, ("read", "a")),
    "short step": lambda store: perform(store, ("step", "a", 100, 3)),
    "step": lambda store: perform(store, ("step", "a", 100, 50)),
    "truncate": lambda store: store["a"].truncate(40),
    "fork": lambda store: store["a"].fork("twin"),
    "create": lambda store: store.create("new"),
    "drop": lambda store: store.drop("a"),
    "stats": lambda store: store.stats(),
    "room": lambda store: store.room(),
    "flush": lambda store: store.flush(),
    "checkpoint": lambda store: store.checkpoint(),
    "unload": lambda store: store.unload("a"),
    "check": lambda store: store.check(),
    "evict": lambda store: store.evict(max_bytes=1 << 30),
    "vacuum": lambda store: store.vacuum(),
    "close": lambda store: store.close(),
}
MUST_WAIT = {"flush", "checkpoint", "unload", "check", "evict", "vacuum", "close"}
AFTER = {"short step": run(0, 100) + run(100, 3), "step": run(0, 100) + run(100, 50), "truncate": run(0, 40)}


class Writer:
    """Transactions that begin when the test lets them; while `failing` the disk refuses them."""

    def __init__(self, monkeypatch):
        self.go, self.busy, self.somebody_waits = threading.Event(), threading.Event(), threading.Event()
        self.failing = False
        write, wait, join = LmdbFile._write_once, threading.Condition.wait, threading.Thread.join

        def late(file, *arguments):
            """Write, when it is time."""
            self.busy.set()
            assert self.go.wait(LIMIT_S)
            if self.failing:
                raise StorageError("made to fail") from lmdb.DiskError("made to fail")
            return write(file, *arguments)

        def noticed(real):
            """Say that the caller waits."""

            def call(*arguments):
                """Wait as ever."""
                if threading.current_thread().name == "caller":
                    self.somebody_waits.set()
                return real(*arguments)

            return call

        monkeypatch.setattr(LmdbFile, "_write_once", late)
        monkeypatch.setattr(threading.Condition, "wait", noticed(wait))
        monkeypatch.setattr(threading.Thread, "join", noticed(join))


@pytest.fixture
def writer(monkeypatch):
    writer = Writer(monkeypatch)
    yield writer
    writer.failing = False
    writer.go.set()


def saving(path, writer):
    """A store whose only sequence, of 100 rows, is on its way to the disk."""
    store = KVStore.open(path, SCHEMA, small())
    perform(store, ("step", "a", 0, 100))
    assert writer.busy.wait(LIMIT_S)
    return store


def expected(call):
    """What a store holds after a call."""
    tokens = AFTER.get(call, run(0, 100))
    extra = {"fork": {"twin": tokens}, "create": {"new": []}}.get(call, {})
    return extra if call == "drop" else {"a": tokens, **extra}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_waits_for_a_writer_that_is_late_only_where_it_must(tmp_path, writer, call):
    store = saving(tmp_path / "s", writer)
    caller = Caller(CALLS[call], store)
    if call in MUST_WAIT:
        assert writer.somebody_waits.wait(LIMIT_S)
        assert caller.is_alive()
        writer.go.set()
    assert caller.has_ended()
    assert caller.raised is None
    writer.go.set()
    store.close()
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) == expected(call)
        assert_sound(store)


@pytest.mark.parametrize("when", ["before", "while it waits"])
@pytest.mark.parametrize("call", CALLS)
def test_a_write_that_fails_is_heard_once_and_saved_by_the_next(tmp_path, writer, call, when):
    store, heard = saving(tmp_path / "s", writer), []
    queue = store._persistence._directory.tier._queue
    writer.failing = True
    if when == "before":
        writer.go.set()
        while queue.waiting_bytes:
            threading.Event().wait(0.001)
        writer.failing = False
    caller = Caller(CALLS[call], store)
    if when == "while it waits":
        if call in MUST_WAIT:
            assert writer.somebody_waits.wait(LIMIT_S)
        else:
            assert caller.has_ended()
        writer.go.set()
        while queue._failures == 0:
            threading.Event().wait(0.001)
        writer.failing = False
    assert caller.has_ended()
    heard += [caller.raised] if caller.raised is not None else []
    if caller.raised is not None and call != "close" and found(store) != expected(call):
        CALLS[call](store)
    while call != "close":
        try:
            store.flush()
            break
        except StorageError as error:
            heard.append(error)
    assert len(heard) == 1
    assert "made to fail" in str(heard[0])
    if call != "close":
        assert found(store) == expected(call)
        assert_sound(store)
        store.close()
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        assert found(store) in (({}, expected(call)) if call == "close" else (expected(call),))
        assert_sound(store)
