"""Three stores that are told the same: indexes built beside the pass, at the commit, and none."""

from __future__ import annotations

import numpy as np

from kvstore import IndexConfig, KVStore, MaintenanceError
from tests.builders import SCHEMA, flat_config, make_query, make_rows, same_bits
from tests.executors import Stepping

POOL = make_rows(SCHEMA, 400, seed=8)  # step number i takes its rows from row i on
OPTIONS = {"pq": {"m": 2, "bits": 3}, "page": {"page_tokens": 8}, "sq4": {}}
LAYERS = range(SCHEMA.n_layers)


class LostError(Exception):
    """What is made to go wrong in the background."""


class Trio:
    """`early` is under test. `broken` are tables whose first build was made to fail: they may differ from `late`."""

    def __init__(self, kind="pq", codebook="sequence", weighting=None, wait=True):
        options = OPTIONS[kind] | ({"weighting": weighting} if weighting else {})
        settings = {"min_rows": 24, "append_rows": 8, "codebook": codebook, "codebook_rows": 40}
        self.early = KVStore(
            SCHEMA, flat_config(index=IndexConfig(kind, options, build="overlap", wait=wait, **settings))
        )
        self.late = KVStore(SCHEMA, flat_config(index=IndexConfig(kind, options, **settings)))
        self.plain = KVStore(SCHEMA, flat_config())
        self.stores = (self.early, self.late, self.plain)
        self.worker = self.early.maintenance.executor = Stepping()
        self.waits = wait
        self.broken: set[tuple[str, int]] = set()
        self.due: dict[str, tuple[int, int]] = {}  # of an open step: first row in the pool, rows
        self.owners: dict[int, tuple[str, int]] = {}  # number of the work -> its table
        self.made = 0
        self.create()

    def create(self):
        name = f"s{self.made:02}"
        self.made += 1
        for store in self.stores:
            store.create(name)

    def names(self):
        return sorted(self.late)

    def of(self, name):
        return [store[name] for store in self.stores]

    def surfaces(self, call):
        """Make a call of the store under test that may raise what has failed, once for each table."""
        for _ in range(len(self.broken) + 1):
            try:
                return call()
            except MaintenanceError as error:
                assert isinstance(error.__cause__, LostError)  # noqa: PT017
        raise AssertionError("a failure was raised more than once")

    def note_work(self, name):
        """Remember whose the work is that has come since the last time."""
        for number in range(len(self.owners), len(self.worker.works)):
            self.owners[number] = name, self.worker.works[number].layer

    # ---- what changes the stores ----

    def prompt(self, start, n, layers):
        """A new sequence that has appended to some layers; the oldest makes room."""
        if len(self.late) > 2:
            self.drop(self.names()[0])
        self.create()
        for _ in range(layers):
            self.append(self.names()[-1], start, n)

    def append(self, name, start, n):
        """The next layer of the step, which is opened for the first."""
        early, late, plain = self.of(name)
        if name not in self.due:
            self.surfaces(early.begin_step)
            late.begin_step()
            plain.begin_step()
            self.due[name] = start, n
        start, n = self.due[name]
        layer = late._next_layer
        if layer == len(LAYERS):
            return
        keys, values = (rows[:, start : start + n] for rows in POOL[layer])
        for seq in (early, late, plain):
            seq.append(layer, keys, values)
            seq.observe_queries(layer, POOL[layer][0].repeat(2, 1, 1)[:, start : start + 9])
        self.note_work(name)

    def step(self, name, start, n):
        """Begin a step, if none is open, and commit it."""
        self.append(name, start, n)
        self.commit(name)

    def commit(self, name):
        while name in self.due and self.late[name]._next_layer < len(LAYERS):
            self.append(name, 0, 1)
        if self.due.pop(name, None):
            for seq in self.of(name):
                seq.commit_step()
            self.note_work(name)

    def abort(self, name):
        self.due.pop(name, None)
        for seq in self.of(name):
            seq.abort_step()

    def truncate(self, name, share):
        if name not in self.due:
            for seq in self.of(name):
                seq.truncate(round(share * len(seq)))

    def fork(self, name, share):
        if name in self.due or len(self.late) > 3:
            return
        twin = f"s{self.made:02}"
        self.made += 1
        for seq in self.of(name):
            seq.fork(twin, None if share > 0.5 else round(2 * share * len(seq)))
        self.broken |= {(twin, layer) for layer in LAYERS if (name, layer) in self.broken}

    def drop(self, name):
        self.due.pop(name, None)
        self.broken -= {(name, layer) for layer in LAYERS}
        for store in self.stores:
            store.drop(name)
        if not len(self.late):
            self.create()

    def reindex(self, name, layer):
        if name not in self.due:
            for seq in self.of(name):
                seq.reindex(layer)
            if self.early[name]._indexes[layer].index is not None:
                self.broken.discard((name, layer))

    def run(self, which, n_steps):
        self.worker.advance(which, n_steps)

    def fail(self, which):
        if self.worker.open:
            work = self.worker.open[which % len(self.worker.open)]
            self.broken.add(self.owners[self.worker.works.index(work)])
            work.fail(LostError())

    def finish(self):
        """Let all work end, and mend what was broken."""
        for name in self.names():
            self.commit(name)
        self.worker.finish()
        self.surfaces(self.early.wait)
        for name, layer in sorted(self.broken):
            if name in self.late:
                self.reindex(name, layer)

    # ---- what asks them ----

    def attend(self, name, layer, seed):
        early, late, plain = self.of(name)
        if late.n_rows(layer) == 0:
            return
        q = make_query(SCHEMA, seed)
        found = self.surfaces(lambda: early.attend(layer, q))
        if early._indexes[layer].index is None:
            assert same_bits(found, plain.attend(layer, q))
        if self.waits and (name, layer) not in self.broken:
            assert same_bits(found, late.attend(layer, q))

    def check(self):
        """Rows are the same, and no index covers what it should not."""
        for store in self.stores:
            store._check()
        for name in self.names():
            early, late, _ = self.of(name)
            assert len(early) == len(late)
            for layer in LAYERS:
                mine, other = early._indexes[layer], late._indexes[layer]
                assert all(same_bits(a, b) for a, b in zip(early.read(layer), late.read(layer), strict=True))
                if (name, layer) not in self.broken and self.waits:
                    assert mine.covered in (None, other.covered)
                    assert mine.covered == other.covered or mine.building

    def check_same(self):
        """Once all work is done, indexes are equal bit for bit."""
        for name in self.names():
            early, late, _ = self.of(name)
            for layer in LAYERS:
                if (name, layer) in self.broken:
                    continue  # too few rows to be mended
                mine, other = early._indexes[layer], late._indexes[layer]
                assert mine.covered == other.covered
                assert mine.describe() == other.describe()
                if hasattr(mine.index, "codes"):
                    assert np.array_equal(mine.index.codes, other.index.codes)
                self.attend(name, layer, 1)
