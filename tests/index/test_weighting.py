"""Keys coded in the metric of the queries."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError, NonFiniteError, SchemaMismatchError
from kvstore.index.base import Index
from kvstore.index.codebook import Codebook
from kvstore.index.pq import PQIndex
from kvstore.index.weighting import QueryMoments, Weighting, query_moments
from tests.contracts.index import DIM, HEADS, IndexContract
from tests.index.oracles import inner_products, normal
from tests.index.test_pq import ROPES, decoded

SPACES: list[dict[str, Any]] = [
    {"m": 2, "bits": 6, "space": "raw"},
    {"m": 2, "bits": 6, "space": "raw", "pairs": False},
    *({"m": 1, "bits": 6, "rope": rope} for rope in ROPES.values()),
    {"m": 2, "bits": 6, "rope": ROPES["half"]},
]
every_space = pytest.mark.parametrize("chosen", SPACES, ids=str)


def uneven(n_heads: int, n: int, d: int, seed: int) -> Any:
    """Queries that use few directions much, other ones for each head."""
    sizes = np.stack([np.roll(np.geomspace(10, 0.05, d), 3 * h) for h in range(n_heads)])
    return normal(n_heads, n, d, seed=seed) * sizes[:, None].astype(np.float32)


def built(keys: Any, moments: Any, **chosen: Any) -> PQIndex:
    index = PQIndex(keys.shape[0], keys.shape[2], weighting="queries", **chosen)
    index.train(keys, moments=moments)
    index.add(keys)
    index._check()
    return index


class TestWeightedRaw(IndexContract):
    def make(self, **settings: Any) -> Index:
        return Told(HEADS, DIM, m=2, bits=8, weighting="queries", **settings)


class TestWeightedRope(IndexContract):
    def make(self, **settings: Any) -> Index:
        return Told(HEADS, DIM, m=1, bits=8, rope=ROPES["half"], weighting="queries", **settings)


class Told(PQIndex):
    """An index whose every training knows some queries."""

    def train(self, keys: Any, positions: Any = None, **more: Any) -> None:
        super().train(keys, positions, moments=query_moments(uneven(HEADS, 50, DIM, 3)), **more)


@every_space
def test_scores_are_inner_products_with_decoded_keys(chosen: dict[str, Any]) -> None:
    index = built(normal(2, 300, 16), query_moments(uneven(2, 400, 16, 1)), **chosen)
    q = uneven(2, 3, 16, 2)
    expected = inner_products(q, decoded(index))
    np.testing.assert_allclose(index.scores(q), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@every_space
def test_scores_of_such_queries_are_better_than_without(chosen: dict[str, Any]) -> None:
    keys, q = normal(2, 2000, 16), uneven(2, 50, 16, 2)
    exact = inner_products(q, keys)
    weighted = built(keys, query_moments(uneven(2, 400, 16, 1)), **chosen)
    plain = built(keys, None, **chosen)
    wrong, before = (np.square(index.scores(q) - exact).mean() for index in (weighted, plain))
    assert wrong < 0.8 * before, (wrong, before)


@every_space
def test_queries_that_use_all_directions_alike_change_nothing(chosen: dict[str, Any]) -> None:
    keys, alike = normal(2, 500, 16), np.stack([np.eye(16)] * 2)
    np.testing.assert_array_equal(built(keys, 7 * alike, **chosen).codes, built(keys, None, **chosen).codes)


@every_space
def test_the_errors_of_training_are_those_in_the_metric(chosen: dict[str, Any]) -> None:
    keys = normal(2, 200, 16)
    index = built(keys, query_moments(uneven(2, 400, 16, 1)), **chosen)
    weighting = index.codebook.weighting
    assert weighting is not None
    difference = weighting.keys((keys - decoded(index)).astype(np.float32))
    if "rope" in chosen:  # undone: a turn keeps lengths, the attention factor is on the rotary dimensions
        difference[:, :, : chosen["rope"].rotary_dim] /= chosen["rope"].attention_factor
    np.testing.assert_allclose(index.errors(keys, np.arange(200)), np.square(difference).sum(-1), rtol=1e-3, atol=1e-4)


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(0, 10**6), st.floats(-4, 4))
def test_keys_and_queries_keep_their_products(n_directions: int, seed: int, log_size: float) -> None:
    q = uneven(2, 30, 12, seed)
    q[:, :, n_directions:] = 0  # directions that no query has used
    keys, new = normal(2, 20, 12, seed=seed + 1), normal(2, 4, 12, seed=seed + 2)
    first, second = np.arange(6), np.arange(6) + 6
    moments = query_moments(np.float32(10**log_size) * q)
    for weighting in (Weighting.full(moments), Weighting.of_pairs(moments, first, second)):
        exact = inner_products(new, keys)
        found = inner_products(weighting.queries(new), weighting.keys(keys))
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3 * np.abs(exact).max())
        for head in range(2):
            back = weighting.stored(weighting.keys(keys)[head], head)
            np.testing.assert_allclose(back, keys[head], rtol=1e-3, atol=1e-3)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_moments_do_not_depend_on_how_queries_come(sizes: list[int]) -> None:
    q = normal(2, sum(sizes), 8)
    known, at = QueryMoments(), 0
    for n in sizes:
        known.add(q[:, at : at + n])
        at += n
    if at == 0:
        assert known.mean is None
        return
    np.testing.assert_allclose(known.mean, np.einsum("hni,hnj->hij", q, q) / at, rtol=1e-5, atol=1e-6)
    twin = known.clone()
    twin.add(normal(2, 3, 8, seed=9))
    np.testing.assert_allclose(known.mean, np.einsum("hni,hnj->hij", q, q) / at, rtol=1e-5, atol=1e-6)


def test_a_codebook_brings_its_metric_along() -> None:
    keys = normal(2, 300, 16)
    index = built(keys, query_moments(uneven(2, 400, 16, 1)), m=2, bits=6)
    other = PQIndex(2, 16, m=2, bits=6, codebook=index.codebook)  # not told of any weighting
    other.add(keys)
    np.testing.assert_array_equal(other.codes, index.codes)
    before = index.codebook.weighting
    index.train(keys[:, :100], warm=True)
    assert index.codebook.weighting is before


def test_without_queries_it_says_so() -> None:
    index = PQIndex(1, 16, weighting="queries")
    assert index.describe()["weighting"] == "none, no queries seen"
    index.train(normal(1, 30, 16), moments=query_moments(normal(1, 9, 16)))
    assert index.describe()["weighting"] == "queries"


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="weighting must be 'queries' or None, not 'keys'"):
        PQIndex(1, 16, weighting="keys")
    index, keys = PQIndex(1, 16, weighting="queries"), normal(1, 30, 16)
    with pytest.raises(SchemaMismatchError, match="1 KV heads of 16"):
        index.train(keys, moments=query_moments(normal(2, 9, 16)))
    with pytest.raises(SchemaMismatchError, match="moments must be"):
        index.train(keys, moments=np.ones((1, 16)))
    with pytest.raises(NonFiniteError, match="moments"):
        index.train(keys, moments=np.full((1, 16, 16), np.nan))
    with pytest.raises(NonFiniteError, match="maps"):
        Weighting(np.full((1, 4), np.inf, np.float32), np.ones((1, 4), np.float32))
    assert not index.trained
    wrong = Weighting(np.ones((3, 16), np.float32), np.ones((3, 16), np.float32))
    with pytest.raises(SchemaMismatchError, match="1 KV heads of 16"):
        PQIndex(1, 16, codebook=Codebook(normal(2, 2, 64, 8)[:1], wrong))
