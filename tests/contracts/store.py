"""What every store must do, whatever its tiers, its settings and its kind of index."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pytest
import torch

from kvstore import KVStore, Schema
from tests import oracles
from tests.builders import append, cut, fill, make_query, make_rows, same_bits


class StoreContract(ABC):
    """Inherit and say how a store is made; every test runs against it."""

    @abstractmethod
    def make_store(self) -> KVStore:
        """A new, empty store without a limit that 4000 rows would meet."""

    @pytest.fixture
    def store(self):
        with self.make_store() as store:
            yield store
            store._check()

    @pytest.fixture
    def schema(self, store) -> Schema:
        return store.schema

    @pytest.mark.parametrize("chunk", [700, 64, 7])
    def test_what_is_fetched_is_what_was_appended_bit_for_bit(self, store, schema, chunk):
        rows, seq = make_rows(schema, 700, seed=1), store.create("book")
        for at in range(0, 700, chunk):
            append(seq, cut(rows, at, at + chunk))
        order = torch.randperm(700, generator=torch.Generator().manual_seed(1)).repeat(2)[:900]
        for layer, (keys, values) in enumerate(rows):
            for head in range(schema.n_kv_heads):
                found = seq.fetch(layer, head, order)
                assert same_bits(found[0], keys[head, order])
                assert same_bits(found[1], values[head, order])

    @pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200, 1500])
    @pytest.mark.parametrize("budget", [None, 1.0, 4000])
    def test_a_budget_for_all_rows_is_dense_attention(self, store, schema, n, budget):
        seq, q = store.create("book"), make_query(schema, n)
        for layer, (keys, values) in enumerate(fill(seq, n, seed=n)):
            expected = oracles.attention(q, keys, values, schema.scale)
            np.testing.assert_allclose(seq.attend(layer, q, budget=budget), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("k", [1, 10, 599, 600, 601])
    def test_an_exact_topk_is_a_sort(self, store, schema, k):
        seq = store.create("book")
        keys = fill(seq, 600, seed=3)[-1][0]
        for head in range(schema.n_kv_heads):
            q = make_query(schema, head)[0]
            scores = oracles.wide(keys[head]) @ oracles.wide(q)
            found = store.topk(schema.n_layers - 1, head, q, k, exact=True)
            assert found.exact
            oracles.assert_best_rows(found.positions, scores, k)
            np.testing.assert_allclose(found.scores, scores[found.positions], rtol=1e-4, atol=1e-4)
            assert (found.scores.diff() <= 0).all()

    def test_what_attention_reads_is_within_the_budget_and_is_what_it_says(self, store, schema):
        seq, q = store.create("book"), make_query(schema, 5)
        rows = fill(seq, 2500, seed=5)
        for layer, (keys, values) in enumerate(rows):
            explained = seq.explain(layer, q, analyze=True, budget=300)
            plan, chosen = explained.plan, explained.measured.chosen
            assert plan.n_attended == 300
            read = [
                np.r_[: plan.sinks_stop, chosen[head], plan.tail_start : plan.n_rows]
                for head in range(schema.n_kv_heads)
            ]
            assert all(len(set(r.tolist())) == 300 for r in read)
            expected = oracles.attention(q, keys, values, schema.scale, read)
            np.testing.assert_allclose(seq.attend(layer, q, budget=300), expected, rtol=1e-4, atol=1e-5)

    def test_sequences_in_turn_give_what_each_gives_alone_bit_for_bit(self, store, schema):
        walks = [self.walk(store, f"s{i}", i) for i in range(3)]
        together = list(zip(*walks, strict=True))
        for i in range(3):
            with self.make_store() as lone:
                for step, outs in enumerate(self.walk(lone, "alone", i)):
                    assert all(same_bits(a, b) for a, b in zip(outs, together[step][i], strict=True))

    def walk(self, store, name, seed):
        """A prompt and 40 tokens after it; yields what attention gave in each layer."""
        schema, length = store.schema, 560 + 100 * seed
        rows, seq = make_rows(schema, length + 40, seed=20 + seed), store.create(name)
        append(seq, cut(rows, 0, length))
        for at in range(length, length + 40):
            outs = []
            with seq.step():
                for layer, one in enumerate(cut(rows, at, at + 1)):
                    seq.append(layer, *one)
                    outs.append(seq.attend(layer, make_query(schema, at), budget=250))
            yield outs

    def test_a_step_is_taken_back_as_a_whole(self, store, schema):
        seq, q = store.create("book"), make_query(schema, 1)
        rows = fill(seq, 600, seed=6)
        before = [seq.attend(layer, q) for layer in range(schema.n_layers)]
        with pytest.raises(RuntimeError), seq.step():
            seq.append(0, *make_rows(schema, 90, seed=7)[0])
            raise RuntimeError
        store._check()
        assert len(seq) == 600
        for layer in range(schema.n_layers):
            assert all(same_bits(a, b) for a, b in zip(seq.read(layer), rows[layer], strict=True))
            assert same_bits(seq.attend(layer, q), before[layer])

    def test_fork_truncate_and_drop_touch_one_sequence_only(self, store, schema):
        seq, q = store.create("book"), make_query(schema, 2)
        rows = fill(seq, 600, seed=8)
        before = [seq.attend(layer, q) for layer in range(schema.n_layers)]
        child = seq.fork("child")
        child.truncate(333)
        more = fill(child, 200, seed=9)
        store._check()
        for layer in range(schema.n_layers):
            expected = [torch.cat([a[:, :333], b], 1) for a, b in zip(rows[layer], more[layer], strict=True)]
            assert all(same_bits(a, b) for a, b in zip(child.read(layer), expected, strict=True))
            assert same_bits(seq.attend(layer, q), before[layer])
        store.drop("child")
        store._check()
        assert all(same_bits(seq.attend(layer, q), before[layer]) for layer in range(schema.n_layers))

    def test_a_name_used_again_brings_nothing_back(self, store, schema):
        fill(store.create("book"), 700, seed=10)
        store.drop("book")
        rows, q = fill(store.create("book"), 650, seed=11), make_query(schema, 3)
        with self.make_store() as fresh:
            twin = fresh.create("book")
            append(twin, rows)
            for layer in range(schema.n_layers):
                assert same_bits(store["book"].attend(layer, q, budget=250), twin.attend(layer, q, budget=250))

    def test_memory_is_given_back(self, store):
        for i in range(3):
            fill(store.create(f"s{i}"), 200, seed=i)
        for name in store:
            store.drop(name)
        stats = store.stats()
        assert (stats.sequences, stats.rows, stats.blocks, stats.heap_used_bytes, stats.index_bytes) == (0, 0, 0, 0, 0)
