"""First indexes that are built while later layers compute: what is covered, when it is taken, and how it fails."""

import dataclasses

import numpy as np
import pytest

from kvstore import IndexConfig, KVStore, RopeSpec
from kvstore.index.cost_model import ClusteringCost, ComputeCost
from tests.builders import SCHEMA, append, contents, fill, flat_config, make_query, make_rows, random, same_bits
from tests.executors import Stepping

ROPE_SCHEMA = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(10000.0, 16),) * 2, fingerprint="with RoPE")
OPTIONS = {"pq": {"m": 2, "bits": 4}, "page": {"page_tokens": 8}, "faiss": {"factory": "PQ2x4"}}


def config(build="overlap", kind="pq", options=None, **changes):
    options = OPTIONS.get(kind, {}) if options is None else options
    return flat_config(index=IndexConfig(kind, options, min_rows=24, append_rows=8, build=build, **changes))


def stepping(schema=SCHEMA, **changes):
    store = KVStore(schema, config(**changes))
    store.maintenance.executor = Stepping()
    return store, store.create("book"), store.maintenance.executor


def late(schema=SCHEMA, **changes):
    """The same rows in a store that builds at the commit."""
    store = KVStore(schema, config("commit", **changes))
    return store, store.create("book")


def assert_same(seq, other, seed=3):
    for layer in range(SCHEMA.n_layers):
        q = make_query(SCHEMA, seed)
        assert same_bits(seq.attend(layer, q), other.attend(layer, q))
        assert same_bits(seq.topk(layer, 1, q[2:], 20).scores, other.topk(layer, 1, q[2:], 20).scores)
        assert seq._indexes[layer].covered == other._indexes[layer].covered
        assert seq._indexes[layer].describe() == other._indexes[layer].describe()


# ---- what is built, and when ----


def test_a_layer_is_handed_over_when_it_is_appended():
    store, seq, worker = stepping()
    rows = make_rows(SCHEMA, 100, seed=0)
    with seq.step():
        for layer in range(2):
            seq.append(layer, *rows[layer])
            assert len(worker.works) == layer + 1
        worker.finish()
        assert [keeper.index for keeper in seq._indexes] == [None, None]
        assert seq.explain(0, make_query(SCHEMA, 0)).plan.reason == "index is being built"
    assert seq._indexes[0].covered == seq._indexes[1].covered == (2, 92)
    assert len(worker.works) == 2
    store._check()


@pytest.mark.parametrize("kind", ["faiss", "page", "pq", "rabitq", "sparq", "sq4", "sq8"])
@pytest.mark.parametrize("schema", [SCHEMA, ROPE_SCHEMA], ids=["raw", "rope"])
def test_every_kind_of_index_is_what_it_would_be_at_the_commit(kind, schema):
    if kind == "faiss":
        pytest.importorskip("faiss")
        if schema.rope:
            pytest.skip("FAISS codes rotated keys only")
    store, seq, _ = stepping(schema, kind=kind)
    _, other = late(schema, kind=kind)
    for who in (seq, other):
        fill(who, 150, seed=1)
        fill(who, 20, seed=2)
    assert_same(seq, other)
    assert store.stats().index_builds == 2


def test_a_table_that_grows_row_by_row_gets_its_index_at_the_same_row():
    _, seq, worker = stepping()
    _, other = late()
    rows = make_rows(SCHEMA, 60, seed=4)
    for at in range(60):
        part = [(keys[:, at : at + 1], values[:, at : at + 1]) for keys, values in rows]
        append(seq, part)
        append(other, part)
        assert_same(seq, other, seed=at)
    assert len(worker.works) == 2


def test_padding_that_is_known_after_the_first_layer_begins_it_again():
    _, seq, worker = stepping()
    _, other = late()
    rows = make_rows(SCHEMA, 100, seed=0)
    for who in (seq, other):
        who.begin_step()
        who.append(0, *rows[0])
        who.first_row = 5
        who.append(1, *rows[1])
        who.commit_step()
    assert len(worker.works) == 3
    assert seq._indexes[0].building
    assert_same(seq, other)
    assert seq._indexes[0].covered == (7, 92)


@pytest.mark.parametrize("order", ["as the adapter does", "after the next layer"])
def test_an_index_for_queries_waits_until_they_are_known(order):
    options = {"m": 2, "bits": 4, "weighting": "queries"}
    _, seq, worker = stepping(options=options)
    _, other = late(options=options)
    rows, q = make_rows(SCHEMA, 100, seed=0), random((4, 50, 16), 9)
    for who in (seq, other):
        with who.step():
            who.append(0, *rows[0])
            if order == "as the adapter does":
                who.observe_queries(0, q)
            who.append(1, *rows[1])
            who.observe_queries(0, 3 * q[:, :20])
            who.observe_queries(1, q * 2)
    assert len(worker.works) == 3  # the first of layer 0 had not seen all
    assert_same(seq, other)
    weighting = [who._indexes[0].index.codebook.weighting.forth for who in (seq, other)]
    assert np.array_equal(*weighting)


def test_iterations_are_those_that_are_known_when_the_build_begins():
    _, seq, worker = stepping(iterations="adaptive")
    _, other = late(iterations="adaptive")
    for who in (seq, other):
        iterations = who._store.iterations
        iterations.clustering = ClusteringCost(0.0, 1e-3)
        iterations.compute = ComputeCost(0.0, 5e-3, 0.0)
        fill(who, 100, seed=0)
    assert len(worker.works) == 2
    assert seq._indexes[0].building
    assert_same(seq, other)
    assert seq._indexes[0].index.iterations == 5


def test_adaptive_iterations_of_a_first_prompt_wait_for_its_commit():
    _, seq, worker = stepping(iterations="adaptive")
    rows = make_rows(SCHEMA, 100, seed=0)
    with seq.step():
        for layer in range(2):
            seq.append(layer, *rows[layer])
        assert not worker.works
        seq._store.iterations.clustering = ClusteringCost(0.0, 1e-3)
        seq._store.iterations.compute = ComputeCost(0.0, 7e-3, 0.0)
    assert len(worker.works) == 2
    store_index = seq.explain(0, make_query(SCHEMA, 0)).index
    assert store_index["iterations"] == "7 adaptive"


@pytest.mark.parametrize("codebook", ["model", "auto"])
def test_the_first_to_commit_gives_the_codebook_whoever_appended_first(codebook):
    settings = {"codebook": codebook, "codebook_rows": 30}
    store, seq, worker = stepping(**settings)
    other_store, other = late(**settings)
    for who in (seq, other):
        first, second = who, who._store.create("second")
        rows = [make_rows(SCHEMA, 100, seed) for seed in (0, 1)]
        for sequence in (first, second):
            sequence.begin_step()
        for layer in range(2):
            first.append(layer, *rows[0][layer])
            second.append(layer, *rows[1][layer])
        second.commit_step()
        first.commit_step()
    assert store["second"]._indexes[0].covered == (2, 92)  # built at its commit
    assert seq._indexes[0].building  # only to be encoded
    fill(store.create("third"), 100, seed=2)
    fill(other_store.create("third"), 100, seed=2)
    assert len(worker.works) == 4
    for name in store:
        assert_same(store[name], other_store[name])


def test_a_codebook_that_is_trained_meanwhile_is_the_one_that_is_used():
    settings = {"codebook": "model", "codebook_rows": 30}
    store, seq, worker = stepping(**settings)
    other_store, other = late(**settings)
    for who in (seq, other):
        fill(who, 100, seed=0)
        fresh = who._store.create("fresh")
        rows = make_rows(SCHEMA, 100, seed=1)
        with fresh.step():
            for layer in range(2):
                fresh.append(layer, *rows[layer])
            who._store.train_codebooks("book", 1)
    assert len(worker.works) == 3
    assert store["fresh"].explain(1, make_query(SCHEMA, 0)).index["codebook"] == "model v2"
    assert_same(store["fresh"], other_store["fresh"])


# ---- waiting, or not ----


def test_a_query_waits_for_the_index_of_its_layer_only():
    _, seq, worker = stepping()
    _, other = late()
    for who in (seq, other):
        fill(who, 100, seed=0)
    q = make_query(SCHEMA, 0)
    assert same_bits(seq.attend(0, q, budget=None), other.attend(0, q, budget=None))
    assert len(worker.open) == 2  # a dense plan needs no index
    assert same_bits(seq.attend(0, q), other.attend(0, q))
    assert len(worker.open) == 1
    assert seq._indexes[1].covered is None
    assert_same(seq, other)


def test_without_waiting_rows_are_scanned_exactly_until_the_index_is_there():
    store, seq, worker = stepping(wait=False)
    exact = KVStore(SCHEMA, flat_config()).create("book")
    _, other = late()
    q = make_query(SCHEMA, 0)
    for who in (seq, exact, other):
        fill(who, 100, seed=0)
    assert seq.explain(0, q).plan.reason == "index is being built"
    assert "plan: flat, index is being built" in str(seq.explain(0, q))
    assert same_bits(seq.attend(0, q), exact.attend(0, q))
    fill(seq, 30, seed=1)
    fill(exact, 30, seed=1)
    assert same_bits(seq.attend(0, q), exact.attend(0, q))
    worker.finish()
    assert seq.explain(0, q).plan.reason == "covered by the index"
    assert seq._indexes[0].covered == (2, 92)
    fill(seq, 8, seed=2)
    assert seq._indexes[1].covered == (2, 130)
    store._check()


def test_contents_are_the_same_once_all_is_done():
    store, seq, _ = stepping(threads=2)
    other_store, other = late(threads=2)
    for who in (seq, other):
        for i in range(4):
            fill(who, 40, seed=i)
    store.wait()
    assert contents(store) == contents(other_store)
