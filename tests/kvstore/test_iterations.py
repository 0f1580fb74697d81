"""How many K-Means iterations a store's trainings get."""

import dataclasses

import numpy as np
import pytest

from kvstore import IndexConfig, KVStore, RopeSpec
from kvstore.index.cost_model import ClusteringCost
from kvstore.iterations import MOST_LENGTHS
from tests.builders import SCHEMA, fill, flat_config, make_query

COMPUTE = [(s, 1e-3 + 1e-6 * s + 1e-9 * s * s) for s in (100, 1000, 10000)]


def store_with(wanted, **options):
    index = IndexConfig("pq", {"m": 2, "bits": 4, **options}, min_rows=24, append_rows=8, iterations=wanted)
    return KVStore(SCHEMA, flat_config(index=index))


def trained(store, n=100):
    seq = store.create("book")
    fill(seq, n)
    index = seq._indexes[0].index
    return index, seq.explain(0, make_query(SCHEMA, 0)).index


def test_nothing_is_said_where_nothing_was_set():
    index, shown = trained(store_with(None, iterations=7))
    assert index.iterations == 7
    assert "iterations" not in shown


def test_a_number_is_taken_as_it_is():
    index, shown = trained(store_with(3))
    assert index.iterations == 3
    assert shown["iterations"] == "3 as set"


def test_without_a_compute_cost_the_default_is_taken_and_explain_says_so():
    plain, _ = trained(store_with(None))
    index, shown = trained(store_with("adaptive"))
    assert index.iterations == plain.iterations
    assert shown["iterations"] == "default, no compute cost was measured"
    assert np.array_equal(index.codes, plain.codes)


@pytest.mark.parametrize(("row_s", "expected"), [(1e-3, 1), (1e-7, 25), (1e-6, 12)])
def test_as_many_iterations_as_hide_behind_the_layers_compute(row_s, expected):
    store = store_with("adaptive")
    store.iterations.clustering = ClusteringCost(0.0, row_s)
    store.iterations.measured(COMPUTE)
    index, shown = trained(store)
    assert index.iterations == expected
    assert shown["iterations"] == f"{expected} adaptive"


def test_longer_sequences_get_more():
    found = []
    for n in (100, 2000):
        store = store_with("adaptive")
        store.iterations.clustering = ClusteringCost(1e-3, 3e-7)
        store.iterations.measured(COMPUTE)
        found.append(trained(store, n)[0].iterations)
    assert found == [3, 9]


def test_forward_passes_observed_make_the_compute_cost():
    iterations = store_with("adaptive").iterations
    iterations.observed(200, 4e-3)
    assert iterations.compute.seconds(200) == pytest.approx(4e-3)
    iterations.observed(100, 3e-3)  # the newest counts while there are few
    assert iterations.compute.seconds(100) == pytest.approx(3e-3)
    iterations.observed(100, 1.0)  # something else ran beside it
    assert iterations.compute.seconds(100) == pytest.approx(3e-3)
    for tokens, seconds in ((0, 1.0), (300, 0.0), (300, -1.0), (300, float("nan")), (300, float("inf"))):
        iterations.observed(tokens, seconds)
    assert iterations.compute.seconds(100) == pytest.approx(3e-3)


def test_three_lengths_observed_are_fitted_and_a_model_that_was_given_stays():
    iterations = store_with("adaptive").iterations
    for tokens, seconds in COMPUTE:
        iterations.observed(tokens, seconds)
    assert iterations.compute.seconds(3000) == pytest.approx(1e-3 + 3e-3 + 9e-3, rel=0.01)
    iterations.measured([(tokens, 2 * seconds) for tokens, seconds in COMPUTE])
    given = iterations.compute
    iterations.observed(100, 1e-9)
    assert iterations.compute == given


def test_old_lengths_are_forgotten():
    iterations = store_with("adaptive").iterations
    for tokens in range(1, 200):
        iterations.observed(tokens, 1e-3 * tokens)
    assert len(iterations._fastest) == MOST_LENGTHS
    assert min(iterations._fastest) == 200 - MOST_LENGTHS


@pytest.mark.parametrize("space", ["raw", "rope", None])
def test_the_clustering_cost_is_fitted_when_it_is_first_needed_and_kept(space, tmp_path, monkeypatch):
    schema = dataclasses.replace(
        SCHEMA, rope=(None, RopeSpec.from_theta(1e4, 16)) if space is None else (RopeSpec.from_theta(1e4, 16),) * 2
    )
    options = {"m": 2, "bits": 4} | ({"space": space} if space else {})
    index = IndexConfig("pq", options, min_rows=24, iterations="adaptive")
    for _ in range(2):
        store = KVStore(schema, flat_config(index=index))
        store.iterations.directory = tmp_path
        fill(store.create("before"), 50)
        assert store.iterations.clustering is None
        store.iterations.measured(COMPUTE)
        fill(store.create("book"), 100)
        assert store.iterations.clustering.limit_rows == 256 * 16
        assert "adaptive" in store["book"].explain(0, make_query(schema, 0)).index["iterations"]
    assert len(list(tmp_path.iterdir())) == 1
