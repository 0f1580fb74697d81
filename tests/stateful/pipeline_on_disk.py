"""The same in a directory, with a heap that is too small, a writer that is late and reads that fail."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest

from kvstore import HeapFullError, KVStore, StorageError
from kvstore.row_records import RowRecords
from tests.builders import make_rows
from tests.kvstore.test_larger_than_memory import SCHEMA, limited
from tests.stateful.pipeline import Pipeline
from tests.stateful.unreliable import DELAYS_S

POOL = make_rows(SCHEMA, 400, seed=8)
HEAP_BLOCKS = 48  # of both layers: 384 rows


class PipelineOnDisk(Pipeline):
    """One step is open at a time: what has not been committed has no place but the heap."""

    schema, pool = SCHEMA, POOL

    def __init__(self, path, seed=0, **settings):
        self._path, self._chance = path, random.Random(seed)
        super().__init__(seed=seed, **settings)

    def open(self, config):
        """The store, whose writer's thread is late."""
        store = KVStore.open(self._path, self.schema, limited(config, heap_bytes=HEAP_BLOCKS * SCHEMA.block_bytes))
        store._persistence._directory.tier._hook = lambda point: time.sleep(self._chance.choice(DELAYS_S))
        return store

    def append(self, name, start, n):
        """The next layer; a step that the heap has no room for is taken back."""
        for other in self.names:
            if other != name and self.told[other].step is not None:
                self.commit(other)
        try:
            super().append(name, start, n)
        except HeapFullError:
            self.abort(name)

    def fork(self, name, share):
        """A fork shares all blocks before it gives up the last ones; without room for that nothing has changed."""
        with suppress(HeapFullError):
            super().fork(name, share)

    def truncate(self, name, share):
        """The block at the cut comes back from the disk; without room for it nothing has changed."""
        with suppress(HeapFullError):
            super().truncate(name, share)

    def check(self):
        """Of sequences that come back from the disk too: there is room once no step is open and no index is built."""
        try:
            super().check()
        except HeapFullError:
            for name in self.names:
                self.commit(name)
            self.wait()
            super().check()

    def flush(self):
        """Have all committed rows on disk."""
        self.store.flush()

    def unload(self, name):
        """Take a sequence out of memory."""
        if self.told[name].step is None:
            self.store.unload(name)

    def reopen(self):
        """Close the store and open it again."""
        for name in self.names:
            self.commit(name)
        config = self.store.config
        self.store.close()
        self.worker = type(self.worker)(*(() if not hasattr(self.worker, "_threads") else (1, 0)))
        self.store = self.open(config)
        self.store.maintenance.executor = self.worker

    def attend_while_a_read_fails(self, name, layer, seed, budget):
        """The first read is an error, if there is one; the next call is right."""
        real, left = RowRecords.read, [1]

        def read(rows, *arguments):
            """Fail once."""
            if left:
                left.pop()
                raise StorageError("made to fail")
            return real(rows, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowRecords, "read", read)
            try:
                self.attend(name, layer, seed, budget)
            except StorageError:
                self.store._check()
        self.attend(name, layer, seed, budget)

    def finish(self):
        """The same, and the directory agrees with itself."""
        super().finish()
        findings = self.store.check()
        assert findings == []
