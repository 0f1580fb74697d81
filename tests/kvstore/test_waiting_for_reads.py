"""Reading blocks from the disk is late, or fails, while others wait for the store: all end, and rows are right."""

import threading

import pytest

from kvstore import StorageError
from kvstore.locking import StoreLock
from kvstore.row_records import RowRecords
from tests.builders import fill, make_query, pq_config, same_bits
from tests.kvstore.callers import LIMIT_S, Caller
from tests.kvstore.test_larger_than_memory import BLOCK_BYTES, SCHEMA, pair

READS = {
    "attend": lambda seq: [seq.attend(0, make_query(SCHEMA, 1))],
    "dense": lambda seq: [seq.attend(0, make_query(SCHEMA, 1), budget=None)],
    "topk": lambda seq: [seq.topk(0, 1, make_query(SCHEMA, 1)[2:4], 40).scores],
    "exact": lambda seq: [seq.topk(0, 1, make_query(SCHEMA, 1)[2], 9, exact=True).scores],
    "read": lambda seq: seq.read(1),
    "fetch": lambda seq: seq.fetch(0, 1, [3, 200, 999]),
    "truncate": lambda seq: seq.truncate(700) or seq.read(0),
}
MEANWHILE = {
    "attend": lambda store, other: other.attend(0, make_query(SCHEMA, 2)),
    "step": lambda store, other: fill(other, 20, seed=9),
    "flush": lambda store, other: store.flush(),
    "drop": lambda store, other: store.drop("other"),
    "create": lambda store, other: store.create("new"),
}


class Disk:
    """Reads that go on when the test lets them; the first of them fails if it says so."""

    def __init__(self, monkeypatch):
        self.go, self.busy, self.somebody_waits = threading.Event(), threading.Event(), threading.Event()
        self.fails = False
        read, enter = RowRecords.read, StoreLock.__enter__

        def late(rows, *arguments):
            """Read, when it is time."""
            self.busy.set()
            assert self.go.wait(LIMIT_S)
            if self.fails:
                self.fails = False
                raise StorageError("made to fail")
            return read(rows, *arguments)

        def entering(lock):
            """Say that the store is wanted."""
            if self.busy.is_set():
                self.somebody_waits.set()
            enter(lock)

        monkeypatch.setattr(RowRecords, "read", late)
        monkeypatch.setattr(StoreLock, "__enter__", entering)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("ask", "meanwhile"), [*((ask, "step") for ask in READS), *(("attend", m) for m in MEANWHILE)])
def test_who_waits_for_the_store_goes_on_after_a_read(tmp_path, monkeypatch, ask, meanwhile, fails):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config(), pool_bytes=20 * BLOCK_BYTES)
    with here, there, monkeypatch.context() as patch:
        other = there.create("other")
        fill(other, 40, seed=3)
        disk = Disk(patch)
        reader = Caller(READS[ask], theirs)
        assert disk.busy.wait(LIMIT_S)
        waiting = Caller(MEANWHILE[meanwhile], there, other)
        assert disk.somebody_waits.wait(LIMIT_S)
        assert waiting.is_alive()
        disk.fails = fails
        disk.go.set()
        assert reader.has_ended()
        assert waiting.has_ended()
        assert waiting.raised is None
        assert isinstance(reader.raised, StorageError) if fails else reader.raised is None
        there._check()
        found, expected = READS[ask](theirs), READS[ask](ours)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        there._check()
        there._spill_pool.frames._check()
