"""Batches on their way to the disk: bounded in bytes, written by one thread, in the order they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvstore.errors import SpillFullError, StorageError, StoreClosedError
from kvstore.storage.buffers import Buffers
from kvstore.storage.record import Encoded


class Batch(NamedTuple):
    """What is written in one go: keys to forget, then records to keep, as stored."""

    number: int
    deletes: Sequence[bytes]
    puts: dict[bytes, Encoded]
    n_bytes: int


Commit = Callable[[Sequence[Batch]], None]
Waiting = tuple[int, bytes | None]
"""Number of the batch that waits, and a copy of the record in it, None where it is to be forgotten."""


class WriteQueue:
    """Takes batches from any thread and hands them to `commit` on a thread of its own, several at a time.

    `commit` writes all of the batches it is given or raises. When several together fail, each is tried alone. A batch
    that fails alone is dropped with all that wait behind it, so what is written is always a beginning of what came; the
    error is raised by the next `put` or `drain`, once. The thread begins with the first batch.

    Attributes:
        queue_bytes: room for batches that wait; a batch that is larger on its own is taken when nothing waits.
        commit_bytes: how many bytes are handed to `commit` together, unless one batch alone has more.
        buffers: where records lie, and whereto they go back; readers get copies.
        block: whether `put` waits for room, or raises `SpillFullError`.
    """

    def __init__(
        self, commit: Commit, buffers: Buffers, *, queue_bytes: int, commit_bytes: int, block: bool, name: str
    ) -> None:
        self.queue_bytes = queue_bytes
        self.commit_bytes = commit_bytes
        self.block = block
        self.buffers = buffers
        self._commit = commit
        self._name = name
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[Batch] = deque()
        self._latest: dict[bytes, tuple[int, Encoded | None]] = {}  # by key
        self._waiting_bytes = 0
        self._accepted = self._settled = self._written = 0
        self._failures = 0
        self._last_error: BaseException | None = None
        self._error: BaseException | None = None  # the last one, until somebody has heard it
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def written(self) -> int:
        """Number of the last batch that was written; one that was dropped never counts."""
        return self._written

    @property
    def waiting_bytes(self) -> int:
        """Bytes of records that wait, those being written included."""
        return self._waiting_bytes

    def put(self, puts: dict[bytes, Encoded], deletes: Sequence[bytes]) -> int:
        """Accept a batch and return its number; raises what went wrong before, `SpillFullError` or `StorageError`."""
        n_bytes = sum(len(key) + len(data) for key, data in puts.items()) + sum(map(len, deletes))
        with self._changed:
            self._wait_for_room(n_bytes)
            self._start()  # first: a batch that is accepted without it would wait for ever
            self._accepted += 1
            batch = Batch(self._accepted, deletes, puts, n_bytes)
            self._waiting.append(batch)
            self._waiting_bytes += n_bytes
            self._latest.update((key, (batch.number, None)) for key in deletes)
            self._latest.update((key, (batch.number, data)) for key, data in puts.items())
            self._changed.notify_all()
            return batch.number

    def find(self, keys: Sequence[bytes]) -> list[Waiting | None]:
        """Return, for each key that waits, its batch's number and its record (None: to be forgotten), else None."""
        with self._changed:
            return self._copies(keys)

    @contextmanager
    def frozen(self, keys: Sequence[bytes]) -> Iterator[list[Waiting | None]]:
        """Like `find`, and no batch is accepted inside the `with` block."""
        with self._changed:
            yield self._copies(keys)

    def waiting(self) -> dict[bytes, bool]:
        """Return every key that waits, and whether its record will be kept."""
        with self._changed:
            return {key: data is not None for key, (_, data) in self._latest.items()}

    def drain(self) -> None:
        """Wait until all that was accepted so far is written; raises what went wrong."""
        with self._changed:
            self._raise_error()
            target, failures = self._accepted, self._failures
            while self._settled < target:
                self._changed.wait()
            if failures != self._failures and self._last_error is not None:  # every thread that waits hears it
                self._error = None
                raise self._last_error

    def stop(self) -> None:
        """Write what waits, end the thread, then raise what went wrong; `put` raises `StoreClosedError` from now on."""
        with self._changed:
            self._stopping = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        with self._changed:
            self._raise_error()

    def _copies(self, keys: Sequence[bytes]) -> list[Waiting | None]:
        found = [self._latest.get(key) for key in keys]
        return [item and (item[0], None if item[1] is None else bytes(item[1])) for item in found]

    def _start(self) -> None:
        """Start the thread, if it does not run yet; raises `StorageError` when none can be had."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise StorageError(f"no thread can be had to write with ({error}); end some, then write again") from error

    def _wait_for_room(self, n_bytes: int) -> None:
        while True:
            if self._stopping:
                raise StoreClosedError("the tier is being closed; open it again to write")
            self._raise_error()
            if not self._waiting or self._waiting_bytes + n_bytes <= self.queue_bytes:
                return
            if not self.block:
                raise SpillFullError(
                    f"{self._waiting_bytes} bytes wait to be written, {n_bytes} more would pass the limit of "
                    f"{self.queue_bytes}; write again later, raise queue_bytes, or let writers block"
                )
            self._changed.wait()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if not self._waiting:
                    return
                group = self._next_group()
            n_written, error = self._commit_group(group)
            with self._changed:
                self._retire(n_written)
                self._written = self._settled
                if error is not None:
                    self._retire(len(self._waiting))  # what comes after a batch that is lost must not be kept
                    self._error = self._last_error = error
                    self._failures += 1
                self._changed.notify_all()
            del group, error  # a thread that waits must not hold on to records

    def _next_group(self) -> list[Batch]:
        """Return the batches to write together; they stay in the queue, readers see them there."""
        group: list[Batch] = []
        n_bytes = 0
        for batch in self._waiting:
            if group and n_bytes + batch.n_bytes > self.commit_bytes:
                break
            group.append(batch)
            n_bytes += batch.n_bytes
        return group

    def _commit_group(self, group: list[Batch]) -> tuple[int, BaseException | None]:
        try:
            self._commit(group)
            return len(group), None
        except BaseException as error:  # to be raised where somebody hears it
            if len(group) == 1:
                return 0, error
        for i, batch in enumerate(group):
            try:
                self._commit([batch])
            except BaseException as error:
                return i, error
        return len(group), None

    def _retire(self, n_batches: int) -> None:
        for _ in range(n_batches):
            batch = self._waiting.popleft()
            self._waiting_bytes -= batch.n_bytes
            self._settled = batch.number
            for key in (*batch.deletes, *batch.puts):
                if self._latest.get(key, (0,))[0] == batch.number:
                    del self._latest[key]
            for data in batch.puts.values():
                self.buffers.give(data)

    def _check(self) -> None:
        """Assert the invariants: the bytes that wait equal a recount, and readers find just what waits."""
        with self._changed:
            assert self._waiting_bytes == sum(batch.n_bytes for batch in self._waiting)
            assert set(self._latest) == {key for batch in self._waiting for key in (*batch.deletes, *batch.puts)}
            self.buffers._check()
