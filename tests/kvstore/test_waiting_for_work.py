"""Every call, while work in the background is late or has failed: it ends, rows are right, an error is heard once."""

import threading

import pytest

from kvstore import KVStore, KVStoreError, MaintenanceError
from kvstore.maintenance import Job, Maintenance
from kvstore.reindex import Rebuild
from tests.builders import SCHEMA, fill, make_query, make_rows, same_bits
from tests.kvstore.callers import LIMIT_S, Caller
from tests.kvstore.test_overlap import assert_same, config, late

CALLS = {
    "attend": lambda store, seq: seq.attend(1, make_query(SCHEMA, 0)),
    "explain": lambda store, seq: seq.explain(1, make_query(SCHEMA, 0)),
    "topk": lambda store, seq: seq.topk(1, 0, make_query(SCHEMA, 0)[:2], 5),
    "dense": lambda store, seq: seq.attend(1, make_query(SCHEMA, 0), budget=None),
    "step": lambda store, seq: fill(seq, 8, seed=1),
    "abort": lambda store, seq: (seq.begin_step(), seq.append(0, *make_rows(SCHEMA, 9, 1)[0]), seq.abort_step()),
    "truncate": lambda store, seq: seq.truncate(50),
    "fork": lambda store, seq: seq.fork("twin"),
    "reindex": lambda store, seq: seq.reindex(),
    "background": lambda store, seq: seq.reindex(background=True),
    "wait": lambda store, seq: store.wait(),
    "flush": lambda store, seq: store.flush(),
    "checkpoint": lambda store, seq: store.checkpoint(),
    "unload": lambda store, seq: store.unload("book"),
    "stats": lambda store, seq: store.stats(),
    "drop": lambda store, seq: store.drop("book"),
    "close": lambda store, seq: store.close(),
}
NEED_A_FIRST_INDEX = {"attend", "explain", "topk", "step", "truncate", "fork", "background", "checkpoint", "unload"}
NEED_ALL_WORK = {"wait", "close"}
RAISE = {"attend", "explain", "topk", "step", "abort", "wait"}  # what has failed; `abort` and `step` begin a step
GIVE_UP = {"reindex", "background", "truncate", "unload", "drop", "close"}  # what nobody wants any more cannot fail
ON_DISK = {"flush", "checkpoint", "unload", "close"}


class Held:
    """Builds that begin when the test lets them; those of `failing` jobs end with an error of their own."""

    def __init__(self, monkeypatch):
        self.go, self.somebody_waits = threading.Event(), threading.Event()
        self.failing = []
        real, result, close = Rebuild.__call__, Job.result, Maintenance.close

        def build(rebuild, job):
            """Be late; then fail, or do what is to be done."""
            assert self.go.wait(LIMIT_S)
            if job in self.failing:
                raise MemoryError("made to fail")
            return real(rebuild, job)

        def waiting(job, timeout_s=None):
            """Say that the result is waited for."""
            self.somebody_waits.set()
            return result(job, timeout_s)

        def closing(maintenance):
            """Say that the end of the threads is waited for."""
            self.somebody_waits.set()
            close(maintenance)

        monkeypatch.setattr(Rebuild, "__call__", build)
        monkeypatch.setattr(Job, "result", waiting)
        monkeypatch.setattr(Maintenance, "close", closing)


@pytest.fixture
def held(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.go.set()


def working(path, kind, wait, call):
    """A store whose only sequence of 100 rows has its first indexes built, or is indexed again, by held threads."""
    settings = config("overlap" if kind == "first" else "commit", wait=wait, threads=2)
    store = KVStore.open(path, SCHEMA, settings) if call in ON_DISK else KVStore(SCHEMA, settings)
    seq = store.create("book")
    fill(seq, 100, seed=0)
    if kind == "again":
        seq.reindex(background=True)
    return store, seq


def failures_heard(store, seq):
    """Make calls that raise failures until none does; returns the causes, one for each error."""
    causes = []
    for call in (store.wait, seq.abort_step, seq.begin_step, seq.abort_step, lambda: CALLS["attend"](store, seq)):
        while True:
            try:
                call()
                break
            except MaintenanceError as error:
                causes.append(error.__cause__)
            except KVStoreError:  # dropped, or closed
                break
    return causes


def must_wait(call, kind, wait):
    """Whether a call needs what the threads do."""
    return call in NEED_ALL_WORK or (kind == "first" and wait and call in NEED_A_FIRST_INDEX)


def assert_usable(path, store, call):
    """Rows are right, here or in the directory, and the store takes and answers new ones."""
    if call == "close":
        store = KVStore.open(path, SCHEMA)
    seq = store["book"] if "book" in store else store.create("book")
    given, n = make_rows(SCHEMA, 100, seed=0), min(len(seq), 50)
    for layer in range(SCHEMA.n_layers):
        for stored, rows in zip(seq.read(layer, 0, n), given[layer], strict=True):
            assert same_bits(stored, rows[:, :n])
    fill(seq, 60, seed=4)
    store.wait()
    store._check()
    for layer in range(SCHEMA.n_layers):
        q = make_query(SCHEMA, 2)
        assert same_bits(seq.attend(layer, q, budget=len(seq)), seq.attend(layer, q, budget=None))
    assert store.check() == []
    store.close()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", ["first", "again"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_waits_for_work_that_is_late_only_where_it_must(tmp_path, held, call, kind, wait):
    store, seq = working(tmp_path / "s", kind, wait, call)
    caller = Caller(CALLS[call], store, seq)
    if must_wait(call, kind, wait):
        assert held.somebody_waits.wait(LIMIT_S)
        assert caller.is_alive()
        held.go.set()
    assert caller.has_ended()
    assert caller.raised is None
    held.go.set()
    assert_usable(tmp_path / "s", store, call)


@pytest.mark.parametrize("call", sorted(NEED_A_FIRST_INDEX - {"truncate", "fork", "background", "step"}))
def test_what_was_waited_for_is_what_would_have_been_built_at_the_commit(tmp_path, held, call):
    store, seq = working(tmp_path / "s", "first", True, call)
    _, other = late()
    fill(other, 100, seed=0)
    caller = Caller(CALLS[call], store, seq)
    held.go.set()
    assert caller.has_ended()
    assert_same(seq, other)
    store.close()


@pytest.mark.parametrize("when", ["before", "while it waits"])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", ["first", "again"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_is_heard_once_a_layer_or_given_up(tmp_path, held, call, kind, wait, when):
    store, seq = working(tmp_path / "s", kind, wait, call)
    jobs = held.failing = [keeper._first.job if kind == "first" else keeper._job for keeper in seq._indexes]
    if when == "before":
        held.go.set()
        for job in jobs:
            job.wait(LIMIT_S)
    caller = Caller(CALLS[call], store, seq)
    if when == "while it waits" and must_wait(call, kind, wait):
        assert held.somebody_waits.wait(LIMIT_S)
    held.go.set()
    assert caller.has_ended()
    assert caller.raised is None or (call in RAISE and isinstance(caller.raised, MaintenanceError))
    for job in jobs:
        if not job._cancelled.is_set():
            job.wait(LIMIT_S)
    heard = failures_heard(store, seq) + ([caller.raised.__cause__] if caller.raised is not None else [])
    assert len(heard) == len(set(map(id, heard))) == (0 if call in GIVE_UP else SCHEMA.n_layers)
    assert all(isinstance(cause, MemoryError) for cause in heard)
    assert_usable(tmp_path / "s", store, call)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", ["first", "again"])
def test_work_that_finds_no_thread_fails_like_other_work(monkeypatch, kind, wait):
    def refuse(*_):
        """What the interpreter says when the system has no thread left."""
        raise RuntimeError("can't start new thread")

    with KVStore(SCHEMA, config("overlap" if kind == "first" else "commit", wait=wait)) as store:
        seq = store.create("book")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            fill(seq, 100, seed=0)
            if kind == "again":
                seq.reindex(background=True)
        store._check()
        heard = failures_heard(store, seq)
        assert [str(cause) for cause in heard] == ["can't start new thread"] * SCHEMA.n_layers
        assert (seq._indexes[0].index is None) == (kind == "first")
        seq.reindex(background=True)  # its thread does first what the queue had taken all the same, and gives it up
        store.wait()
        assert [keeper.covered for keeper in seq._indexes] == [(2, 92)] * SCHEMA.n_layers
        assert_usable(None, store, "attend")
