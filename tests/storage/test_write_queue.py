"""The queue, with a writer that tests hold, free and break."""

import threading

import pytest

from kvstore.errors import SpillFullError, StorageError, StoreClosedError
from kvstore.storage.buffers import LEAST_BYTES, Buffers
from kvstore.storage.gate import Gate
from kvstore.storage.write_queue import WriteQueue


class Disk:
    """Keeps what is committed; waits while it is held, and fails when told to."""

    def __init__(self):
        self.records = {}
        self.groups = []
        self.fail = set()
        self.free = threading.Event()
        self.free.set()
        self.busy = threading.Event()

    def commit(self, batches):
        self.busy.set()
        assert self.free.wait(60)
        self.groups.append([batch.number for batch in batches])
        for batch in batches:
            if batch.number in self.fail:
                raise StorageError(f"batch {batch.number} cannot be written")
        for batch in batches:
            for key in batch.deletes:
                self.records.pop(key, None)
            self.records.update(batch.puts)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def make(disk):
    queues = []

    def make_queue(queue_bytes=1000, commit_bytes=1000, block=True):
        queues.append(
            WriteQueue(
                disk.commit,
                Buffers(1 << 20),
                queue_bytes=queue_bytes,
                commit_bytes=commit_bytes,
                block=block,
                name="test",
            )
        )
        return queues[-1]

    yield make_queue
    disk.free.set()
    for queue in queues:
        disk.fail.clear()
        try:
            queue.stop()
        except StorageError:
            queue.stop()


def hold(disk, queue):
    """Let the first batch be stuck in the writer."""
    disk.free.clear()
    queue.put({b"first": b"1"}, [])
    assert disk.busy.wait(60)


def test_no_thread_runs_before_the_first_batch(make):
    before = threading.active_count()
    queue = make()
    assert threading.active_count() == before
    queue.drain()
    queue.put({b"k": b"v"}, [])
    assert threading.active_count() == before + 1
    queue.stop()
    assert threading.active_count() == before


def test_batches_that_wait_are_committed_together_up_to_a_size(disk, make):
    queue = make(commit_bytes=20)
    hold(disk, queue)
    for i in range(5):
        queue.put({b"k%d" % i: bytes(8)}, [])  # 10 bytes each
    queue._check()
    disk.free.set()
    queue.drain()
    assert disk.groups == [[1], [2, 3], [4, 5], [6]]
    assert queue.written == 6
    queue._check()


def test_what_waits_is_found_the_latest_first(disk, make):
    queue = make()
    hold(disk, queue)
    queue.put({b"a": b"1", b"b": b"1"}, [])
    queue.put({b"a": b"2"}, [b"b"])
    assert queue.find([b"a", b"b", b"c", b"first"]) == [(3, b"2"), (3, None), None, (1, b"1")]
    assert queue.waiting() == {b"first": True, b"a": True, b"b": False}
    disk.free.set()
    queue.drain()
    assert queue.find([b"a", b"b"]) == [None, None]
    assert disk.records == {b"first": b"1", b"a": b"2"}


def test_a_full_queue_raises_with_the_numbers(disk, make):
    queue = make(queue_bytes=100, block=False)
    hold(disk, queue)
    queue.put({b"k": bytes(90)}, [])
    with pytest.raises(SpillFullError, match="97 bytes wait to be written, 51 more would pass the limit of 100"):
        queue.put({b"l": bytes(50)}, [])
    assert queue.waiting_bytes == 97
    queue._check()
    disk.free.set()
    queue.drain()
    queue.put({b"l": bytes(50)}, [])
    queue.drain()
    assert b"l" in disk.records


def test_a_full_queue_blocks_the_writer_until_there_is_room(disk, make):
    queue = make(queue_bytes=10)
    hold(disk, queue)
    done = threading.Event()

    def write():
        queue.put({b"k": bytes(90)}, [])  # larger than the queue: taken when nothing waits
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not done.wait(0.05)
    disk.free.set()
    thread.join(60)
    assert done.is_set()
    queue.drain()
    assert b"k" in disk.records


@pytest.mark.parametrize("hear", ["put", "drain", "stop"])
def test_an_error_is_heard_once_and_what_comes_after_it_is_dropped(disk, make, hear):
    queue = make(commit_bytes=1)
    hold(disk, queue)
    disk.fail.add(3)
    for i in range(2, 6):
        queue.put({b"k%d" % i: b"x"}, [])
    disk.free.set()
    while queue.waiting_bytes:
        threading.Event().wait(0.001)
    assert queue.written == 2
    call = {"put": lambda: queue.put({b"late": b"x"}, []), "drain": queue.drain, "stop": queue.stop}[hear]
    with pytest.raises(StorageError, match="batch 3 cannot be written"):
        call()
    assert set(disk.records) == {b"first", b"k2"}
    assert queue.find([b"k3", b"k4", b"late"]) == [None, None, None]
    queue._check()
    if hear != "stop":
        queue.put({b"next": b"x"}, [])
        queue.drain()
        assert queue.written == 6
        assert b"next" in disk.records


def test_a_bad_batch_in_a_group_does_not_take_those_before_it(disk, make):
    queue = make()
    hold(disk, queue)
    disk.fail.add(4)
    for i in range(2, 7):
        queue.put({b"k%d" % i: b"x"}, [])
    disk.free.set()
    with pytest.raises(StorageError, match="batch 4"):
        queue.drain()
    assert disk.groups == [[1], [2, 3, 4, 5, 6], [2], [3], [4]]
    assert set(disk.records) == {b"first", b"k2", b"k3"}


def test_every_thread_that_waits_hears_of_an_error(disk, make):
    queue = make()
    hold(disk, queue)
    disk.fail.add(2)
    queue.put({b"k": b"x"}, [])
    heard = []

    def wait():
        try:
            queue.drain()
        except StorageError as error:
            heard.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while queue._changed._waiters is None or len(queue._changed._waiters) < 3:
        threading.Event().wait(0.001)
    disk.free.set()
    for thread in threads:
        thread.join(60)
    assert heard == ["batch 2 cannot be written"] * 3
    queue.drain()


def test_a_writer_that_waits_for_room_hears_of_an_error(disk, make):
    queue = make(queue_bytes=10)
    disk.fail.add(1)
    hold(disk, queue)
    heard = []

    def write():
        try:
            queue.put({b"k": bytes(90)}, [])
        except StorageError as error:
            heard.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    disk.free.set()
    thread.join(60)
    assert heard == ["batch 1 cannot be written"]


def test_stopping_writes_what_waits_and_takes_no_more(disk, make):
    queue = make()
    hold(disk, queue)
    queue.put({b"k": b"x"}, [])
    disk.free.set()
    queue.stop()
    assert b"k" in disk.records
    with pytest.raises(StoreClosedError):
        queue.put({b"l": b"x"}, [])
    queue.stop()


# ---- the gate ----


def test_who_is_alone_is_alone_and_waits_for_those_inside():
    gate, order = Gate(), []
    inside, leave = threading.Event(), threading.Event()

    def share(name):
        with gate.shared():
            order.append(name)
            inside.set()
            leave.wait(60)

    def be_alone():
        with gate.exclusive():
            order.append("alone")

    first = threading.Thread(target=share, args=("first",))
    first.start()
    assert inside.wait(60)
    alone = threading.Thread(target=be_alone)
    alone.start()
    while not gate._waiting:
        threading.Event().wait(0.001)
    second = threading.Thread(target=share, args=("second",))
    second.start()  # must let the one that waits go first
    leave.set()
    for thread in (first, alone, second):
        thread.join(60)
    assert order == ["first", "alone", "second"]


def test_an_error_inside_opens_the_gate_again():
    gate = Gate()
    for way in (gate.shared, gate.exclusive):
        with pytest.raises(RuntimeError, match="inside"), way():
            raise RuntimeError("inside")
    with gate.exclusive():
        pass


# ---- buffers ----


def test_buffers_are_used_again_by_size_and_bounded():
    buffers = Buffers(4 * LEAST_BYTES)
    one = buffers.take(LEAST_BYTES)
    buffers.give(one)
    assert buffers.kept_bytes == LEAST_BYTES
    assert buffers.take(LEAST_BYTES + 1) is not one
    assert buffers.take(LEAST_BYTES) is one
    for n in (LEAST_BYTES, LEAST_BYTES, 2 * LEAST_BYTES, LEAST_BYTES, 1, 5 * LEAST_BYTES):
        buffers.give(bytearray(n))
        buffers._check()
    assert buffers.kept_bytes == LEAST_BYTES  # all were let go when the limit was reached; two sizes are not kept


def test_a_record_that_was_read_does_not_change_when_its_memory_is_used_again(disk, make):
    queue = make(queue_bytes=1 << 20)
    hold(disk, queue)
    queue.put({b"k": queue.buffers.take(LEAST_BYTES)}, [])
    [(_, seen)] = queue.find([b"k"])
    disk.free.set()
    queue.drain()
    again = queue.buffers.take(LEAST_BYTES)
    again[:] = b"x" * LEAST_BYTES
    assert seen == bytes(LEAST_BYTES)
