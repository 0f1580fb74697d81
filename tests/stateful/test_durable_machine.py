"""Random walks through a store in a directory that is closed, opened and killed, beside lists of token numbers."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore import IndexConfig, KVStore, RopeSpec, Schema, StoreConfig
from tests import oracles
from tests.builders import Layers, append, make_query, make_rows, same_bits

SCHEMA = Schema(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=16, block_tokens=8, fingerprint="of a test")
POOL = make_rows(SCHEMA, 600, seed=5)  # token t has the keys and values of row t
SMALL = {"sinks": 2, "window": 6, "budget": 20, "min_selected": 4, "dense_rows": 10, "spill_bytes": 1 << 26}
PQ = IndexConfig("pq", {"m": 2, "bits": 4}, min_rows=16, append_rows=4)

NAMES = st.sampled_from(["a", "b", "c", "d"])
WHICH = st.integers(0, 3)
TOKENS = st.tuples(st.integers(0, 599), st.integers(1, 80)).map(lambda at: [(at[0] + i) % 600 for i in range(at[1])])


def rows_of(tokens: list[int]) -> Layers:
    return [(keys[:, tokens], values[:, tokens]) for keys, values in POOL]


class DurableMachine(RuleBasedStateMachine):
    schema = SCHEMA
    config = StoreConfig(index=PQ, flush_rows=64, **SMALL)

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.path = self.root / "book.kv"
        self.model: dict[str, list[int]] = {}
        self.past: dict[str, list[list[int]]] = {}  # what a sequence has been since it was surely on disk
        self.sure: set[str] = set()  # sequences that are on disk in some state
        self.store = KVStore.open(self.path, self.schema, self.config)

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.root)

    def pick(self, which):
        name = sorted(self.model)[which % len(self.model)]
        return name, self.store[name], self.model[name]

    def note(self, name):
        self.past.setdefault(name, []).append(self.model[name][:])

    def saved(self):
        self.past = {name: [tokens[:]] for name, tokens in self.model.items()}
        self.sure = set(self.model)

    @initialize(tokens=TOKENS)
    def begin_with_some_rows(self, tokens):
        self.create("a")
        self.step(0, tokens)

    @rule(name=NAMES)
    def create(self, name):
        if name not in self.model:
            self.store.create(name)
            self.model[name] = []
            self.note(name)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, tokens=TOKENS)
    def step(self, which, tokens):
        name, seq, held = self.pick(which)
        append(seq, rows_of(tokens))
        held += tokens
        self.note(name)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, share=st.floats(0, 1))
    def truncate(self, which, share):
        name, seq, held = self.pick(which)
        n = round(share * len(held))
        seq.truncate(n)
        del held[n:]
        self.note(name)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, name=NAMES)
    def fork(self, which, name):
        _, seq, held = self.pick(which)
        if name not in self.model:
            seq.fork(name)
            self.model[name] = held[:]
            self.note(name)

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def drop(self, which):
        name, _, _ = self.pick(which)
        self.store.drop(name)
        del self.model[name]
        self.past.pop(name, None)
        self.sure.discard(name)

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def reindex(self, which):
        self.pick(which)[1].reindex()

    @rule(deep=st.booleans())
    def flush(self, deep):
        (self.store.checkpoint if deep else self.store.flush)()
        self.saved()

    @rule()
    def vacuum(self):
        self.store.vacuum()

    @rule()
    def close_and_open(self):
        self.store.close()
        self.store = KVStore.open(self.path, self.schema, self.config)
        self.saved()

    @rule()
    def die_and_open(self):
        """The directory as it is, without the process that had it open."""
        self.store._persistence._directory.tier.flush()
        image = self.root / f"image{len(list(self.root.iterdir()))}"
        shutil.copytree(self.path, image)
        self.store.close()
        self.path = image
        self.store = KVStore.open(image, self.schema, self.config)
        found = {name: self.tokens(self.store[name]) for name in self.store}
        for name, tokens in found.items():
            assert tokens in self.past[name], f"{name!r} came back as it never was"
        assert self.sure <= set(found), f"{self.sure - set(found)} are gone"
        self.model = found
        self.saved()

    def tokens(self, seq):
        """Which tokens the rows of a sequence are, by their keys in layer 0."""
        keys = seq.read(0)[0][0].numpy()
        where = {POOL[0][0][0, t].numpy().tobytes(): t for t in range(600)}
        return [where[row.tobytes()] for row in keys]

    @invariant()
    def all_is_as_it_should_be(self):
        self.store._check()
        self.store._persistence._archive._check()
        assert set(self.store) == set(self.model)
        for name, tokens in self.model.items():
            seq = self.store[name]
            seq._check()
            assert len(seq) == len(tokens)
            for layer in range(2):
                for stored, pool in zip(seq.read(layer), POOL[layer], strict=True):
                    assert same_bits(stored, pool[:, tokens])
            assert seq.positions(0, len(tokens)).tolist() == list(range(len(tokens)))
            if tokens:
                q = make_query(SCHEMA, 3)
                keys, values = POOL[1][0][:, tokens], POOL[1][1][:, tokens]
                dense = oracles.attention(q, keys, values, SCHEMA.scale)
                np.testing.assert_allclose(seq.attend(1, q, budget=None), dense, rtol=2e-5, atol=2e-5)
                assert seq.attend(1, q).isfinite().all()


class RopeMachine(DurableMachine):
    schema = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(1e4, 16),) * 2)
    config = StoreConfig(index=dataclasses.replace(PQ, options={"m": 1, "bits": 5}), flush_rows=0, **SMALL)


class ModelCodebookMachine(DurableMachine):
    index = dataclasses.replace(PQ, codebook="model", codebook_rows=40)
    config = StoreConfig(index=index, flush_rows=20, **SMALL)


class SmallHeapMachine(DurableMachine):
    """Memory for 800 rows: every look at all sequences takes others out and brings them back."""

    config = StoreConfig(
        index=PQ,
        flush_rows=100,
        arena_bytes=10 * SCHEMA.block_bytes,
        heap_bytes=200 * (SCHEMA.block_bytes + 64),
        **SMALL,
    )

    def step(self, which, tokens):
        if self.model and len(self.pick(which)[2]) + len(tokens) <= 800:
            super().step(which, tokens)

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def unload(self, which):
        self.store.unload(self.pick(which)[0])

    @invariant()
    def memory_is_kept(self):
        assert self.store.heap.reserved_bytes <= self.config.heap_bytes


class TinyHeapMachine(DurableMachine):
    """Memory for 240 rows, which one sequence outgrows: blocks lie on the disk, in extents of 32 rows."""

    config = StoreConfig(
        index=PQ,
        flush_rows=100,
        arena_bytes=SCHEMA.block_bytes,
        heap_bytes=60 * (SCHEMA.block_bytes + 64),
        pool_bytes=10 * SCHEMA.block_bytes,
        **SMALL,
    )

    def __init__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("kvstore.row_records.blocks_per_extent", lambda block_bytes: 4)
        super().__init__()

    def teardown(self):
        super().teardown()
        self.patch.undo()

    @invariant()
    def memory_is_kept_and_no_frame_stays_pinned(self):
        assert self.store.heap.reserved_bytes <= self.config.heap_bytes
        if self.store._spill_pool.in_use:
            self.store._spill_pool.frames._check()
            assert self.store._spill_pool.frames.stats().pinned_frames == 0


class TinyHeapFlatMachine(TinyHeapMachine):
    """The same without an index: every query goes through all rows, part by part."""

    config = dataclasses.replace(TinyHeapMachine.config, index=IndexConfig("flat"), pool_bytes=0)


class ScalarMachine(DurableMachine):
    """A kind of index that cannot be stored and is built again."""

    config = StoreConfig(index=IndexConfig("sq8", min_rows=16, append_rows=4), flush_rows=20, **SMALL)


MACHINES = [
    DurableMachine, RopeMachine, ModelCodebookMachine, SmallHeapMachine, TinyHeapMachine, TinyHeapFlatMachine,
    ScalarMachine,
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_in_a_directory_stays_what_it_should_be(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))
