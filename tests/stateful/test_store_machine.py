"""Random walks through a store, beside a model that is a dictionary of lists of token numbers."""

import dataclasses

import numpy as np
import pytest
import torch
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

from kvstore import HeapFullError, IndexConfig, InvalidQueryError, KVStore, Schema, StepError, StoreConfig
from tests import oracles
from tests.builders import Layers, append, make_query, make_rows, same_bits
from tests.executors import ByHand

SCHEMA = Schema(n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=16, block_tokens=8)
POOL = make_rows(SCHEMA, 600, seed=5)  # token t has the keys and values of row t
HEAP_BLOCKS = 140
MEMORY = {"arena_bytes": 40 * SCHEMA.block_bytes, "heap_bytes": HEAP_BLOCKS * SCHEMA.block_bytes}
SMALL = {"sinks": 2, "window": 6, "budget": 20, "min_selected": 4, "dense_rows": 10, **MEMORY}
PQ = IndexConfig("pq", {"m": 2, "bits": 4}, min_rows=16, append_rows=4)

NAMES = st.sampled_from(["a", "b", "c", "d"])
WHICH = st.integers(0, 3)
TOKENS = st.tuples(st.integers(0, 599), st.integers(1, 80)).map(lambda at: [(at[0] + i) % 600 for i in range(at[1])])
LAYERS, HEADS, SEEDS, SHARES = st.integers(0, 1), st.integers(0, 1), st.integers(0, 99), st.floats(0, 1)
BUDGETS = st.sampled_from([None, 1, 12, 30, 0.05, 0.5, 1.0])


def rows_of(tokens: list[int]) -> Layers:
    return [(keys[:, tokens], values[:, tokens]) for keys, values in POOL]


class CrashError(Exception):
    """What a model raises in the middle of its forward pass."""


class StoreMachine(RuleBasedStateMachine):
    config = StoreConfig(index=IndexConfig("flat"), **SMALL)

    def __init__(self):
        super().__init__()
        self.store = KVStore(SCHEMA, self.config)
        self.store.maintenance.executor = ByHand()
        self.model: dict[str, list[int]] = {}
        self.padding: dict[str, int] = {}

    def pick(self, which):
        name = sorted(self.model)[which % len(self.model)]
        return name, self.store[name], self.model[name]

    def visible(self, name, layer):
        """Keys and values that may be attended to."""
        tokens = self.model[name][self.padding[name] :]
        return POOL[layer][0][:, tokens], POOL[layer][1][:, tokens]

    @initialize(tokens=TOKENS, more=TOKENS)
    def begin_with_some_rows(self, tokens, more):
        self.create("a", 0)
        self.step(0, tokens)
        self.step(0, more)

    # ---- what changes the store ------------------------------------------------------------------------------------

    @rule(name=NAMES, padding=st.sampled_from([0, 0, 5]))
    def create(self, name, padding):
        if name not in self.model:
            self.store.create(name, first_row=padding)
            self.model[name], self.padding[name] = [], padding

    @precondition(lambda self: self.model)
    @rule(which=WHICH, tokens=TOKENS)
    def step(self, which, tokens):
        _name, seq, model = self.pick(which)
        try:
            append(seq, rows_of(tokens))
        except HeapFullError:
            assert self.store.heap.used_blocks > HEAP_BLOCKS - 2 * (len(tokens) // 8 + 2)
        else:
            model += tokens

    @precondition(lambda self: self.model)
    @rule(which=WHICH, tokens=TOKENS)
    def decode(self, which, tokens):
        for token in tokens[:15]:
            self.step(which, [token])

    @precondition(lambda self: self.model)
    @rule(which=WHICH, tokens=TOKENS, layer=st.integers(0, 2), crash=st.booleans())
    def failed_step(self, which, tokens, layer, crash):
        _, seq, _ = self.pick(which)
        with pytest.raises((CrashError, StepError, HeapFullError)), seq.step():
            for i in range(layer):
                seq.append(i, *rows_of(tokens)[i])
            if crash or layer in (0, 2):  # else the step ends with a layer missing
                raise CrashError

    @precondition(lambda self: self.model)
    @rule(which=WHICH, share=st.floats(0.3, 1) | st.just(0.0))
    def truncate(self, which, share):
        _, seq, model = self.pick(which)
        keep = round(share * len(model))
        seq.truncate(keep)
        del model[keep:]

    @precondition(lambda self: self.model)
    @rule(which=WHICH, name=NAMES)
    def fork(self, which, name):
        origin, seq, model = self.pick(which)
        if name not in self.model:
            seq.fork(name)
            self.model[name], self.padding[name] = model[:], self.padding[origin]

    @precondition(lambda self: len(self.model) > 1)
    @rule(which=WHICH)
    def drop(self, which):
        name, _, _ = self.pick(which)
        self.store.drop(name)
        del self.model[name], self.padding[name]

    @precondition(lambda self: self.model)
    @rule(which=WHICH, layer=st.sampled_from([None, 0, 1]), background=st.booleans())
    def reindex(self, which, layer, background):
        self.pick(which)[1].reindex(layer, background=background)

    @rule(take=st.booleans())
    def work_in_the_background(self, take):
        """What is done is taken at a commit, or now."""
        self.store.maintenance.executor.run()
        if take:
            self.store.wait()

    @precondition(lambda self: self.model)
    @rule(which=WHICH, budget=BUDGETS)
    def set_budget(self, which, budget):
        self.pick(which)[1].budget = budget

    # ---- what asks it ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model)
    @rule(which=WHICH, layer=LAYERS, head=HEADS, seed=SEEDS, k=st.integers(1, 50), exact=st.booleans())
    def topk(self, which, layer, head, seed, k, exact):
        name, seq, _model = self.pick(which)
        q = make_query(SCHEMA, seed)[head]
        first, keys = self.padding[name], self.visible(name, layer)[0][head]
        scores = oracles.wide(keys) @ oracles.wide(q)
        found = seq.topk(layer, head, q, k, exact=exact)
        rows = found.positions.numpy() - first
        assert len(rows) == len(set(rows.tolist())) == min(k, len(keys))
        assert ((rows >= 0) & (rows < len(keys))).all()
        np.testing.assert_allclose(found.scores, scores[rows], rtol=1e-4, atol=1e-4)
        assert (found.scores.diff() <= 0).all()
        if exact or k >= len(keys):
            assert found.exact
            oracles.assert_best_rows(rows, scores, k)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, layer=LAYERS, head=HEADS, shares=st.lists(SHARES, max_size=10))
    def fetch(self, which, layer, head, shares):
        _, seq, model = self.pick(which)
        rows = [int(share * (len(model) - 1)) for share in shares if model]
        keys, values = seq.fetch(layer, head, rows)
        tokens = [model[row] for row in rows]
        assert same_bits(keys, POOL[layer][0][head, tokens])
        assert same_bits(values, POOL[layer][1][head, tokens])

    @precondition(lambda self: self.model)
    @rule(which=WHICH, layer=LAYERS, seed=SEEDS)
    def attend_to_all(self, which, layer, seed):
        name, seq, _ = self.pick(which)
        self.check_attention(name, seq, layer, make_query(SCHEMA, seed), None)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, layer=LAYERS, seed=SEEDS, budget=st.one_of(st.just("sequence"), BUDGETS))
    def attend_to_some(self, which, layer, seed, budget):
        name, seq, _ = self.pick(which)
        q = make_query(SCHEMA, seed)
        if len(seq) > self.padding[name]:
            explained = seq.explain(layer, q, analyze=True, budget=budget)
            plan, chosen = explained.plan, explained.measured.chosen
            assert plan.sinks_stop >= min(len(seq), self.padding[name] + 2)
            assert plan.method == "dense" or plan.tail_start <= len(seq) - 6
            read = [
                np.r_[plan.first : plan.sinks_stop, chosen[head], plan.tail_start : plan.n_rows] - self.padding[name]
                for head in range(2)
            ]
            assert all(len(r) == len(set(r.tolist())) == plan.n_attended for r in read)
        else:
            read = None
        self.check_attention(name, seq, layer, q, budget, read)

    def check_attention(self, name, seq, layer, q, budget, read=None):
        keys, values = self.visible(name, layer)
        if keys.shape[1] == 0:
            with pytest.raises(InvalidQueryError, match="no rows"):
                seq.attend(layer, q, budget=budget)
            return
        out = seq.attend(layer, q, budget=budget)
        np.testing.assert_allclose(out, oracles.attention(q, keys, values, SCHEMA.scale, read), rtol=1e-4, atol=1e-4)

    @precondition(lambda self: any(len(self.model[n]) > self.padding[n] for n in self.model))
    @rule(layer=LAYERS, seed=SEEDS)
    def attend_together(self, layer, seed):
        names = [n for n in sorted(self.model) if len(self.model[n]) > self.padding[n]]
        sequences = [self.store[n] for n in names]
        q = torch.stack([make_query(SCHEMA, seed + i) for i in range(len(names))])
        together = self.store.attend(layer, sequences, q)
        assert all(same_bits(together[i], seq.attend(layer, q[i])) for i, seq in enumerate(sequences))

    # ---- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def structure_is_sound(self):
        self.store._check()

    @invariant()
    def the_store_holds_what_the_model_holds(self):
        assert sorted(self.store) == sorted(self.model)
        for name, tokens in self.model.items():
            seq = self.store[name]
            assert len(seq) == len(tokens)
            assert not seq.step_open
            for layer, rows in enumerate(rows_of(tokens)):
                assert all(torch.equal(a, b) for a, b in zip(seq.read(layer), rows, strict=True))

    @invariant()
    def statistics_equal_a_recount(self):
        stats = self.store.stats()
        assert (stats.sequences, stats.rows) == (len(self.model), sum(map(len, self.model.values())))
        assert stats.heap_used_bytes == stats.blocks * SCHEMA.block_bytes <= stats.heap_reserved_bytes
        assert stats.heap_reserved_bytes <= HEAP_BLOCKS * SCHEMA.block_bytes
        blocks = {b.key_address for name in self.model for t in self.store[name]._tables for b in t._blocks}
        assert stats.blocks == len(blocks)

    @invariant()
    def indexes_keep_to_their_rows(self):
        for name, tokens in self.model.items():
            for keeper in self.store[name]._indexes:
                if keeper.covered is not None:
                    start, stop = keeper.covered
                    assert start == self.padding[name] + 2
                    assert start <= stop
                    assert stop == start or stop <= len(tokens) - 6

    def teardown(self):
        for name in list(self.model):
            self.store.drop(name)
        assert self.store.heap.used_blocks == 0
        self.store.close()


class IndexedStoreMachine(StoreMachine):
    config = StoreConfig(index=PQ, **SMALL)


class RefiningStoreMachine(StoreMachine):
    """Sequences start from the model's codebook and train again by themselves."""

    config = StoreConfig(
        index=dataclasses.replace(PQ, codebook="auto", codebook_rows=40, reindex_drift=1.05),
        **SMALL,
    )


class OverlappingStoreMachine(StoreMachine):
    """First indexes come when they come; until then rows are scanned exactly."""

    config = StoreConfig(index=dataclasses.replace(PQ, build="overlap", wait=False), **SMALL)


MACHINES = [StoreMachine, IndexedStoreMachine, RefiningStoreMachine, OverlappingStoreMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_any_sequence_of_calls_leaves_the_store_like_the_model(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40))
