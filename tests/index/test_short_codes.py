"""Scans on int16: how far off they may be, and that nothing overflows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.codebook import Codebook
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.short_codes import CENTROID_NORM, LONGEST_PAIR, QUERY_NORM, short_centroids
from tests.index.oracles import inner_products, normal
from tests.index.test_pq import decoded


def coded(centroids: Any, rows: int, dim: int, gain: float = 1.0) -> PQIndex:
    """An index of one head over given centroids [m, k, sub_dim], its rows' codes one after the other."""
    m, k, _ = centroids.shape
    spec = replace(RopeSpec.from_theta(1e4, dim), attention_factor=gain)
    index = PQIndex(1, dim, m=m, bits=8, rope=spec, codebook=Codebook(centroids[None]))
    codes = (np.arange(rows)[:, None] * (1 + np.arange(m)) % k).astype(np.uint8)
    index.add_codes(codes[None], np.arange(rows))
    return index


def bound(q: Any, keys: Any) -> Any:
    """Twice what roundings of half a unit can do to a score, [group, n] of q [group, d] and keys [n, d].

    Units are a 63,000th of a key's norm or a 32,000th of its longest pair, whichever is larger, rounded in the codebook
    and twice when it is turned; so for a query, by 33,400. Pairs are (i, i + d / 2).
    """
    pairs = [np.hypot(*np.split(x.astype(np.float64), 2, axis=-1)) for x in (q, keys)]
    units = [
        np.maximum(x.max(-1) / LONGEST_PAIR, np.linalg.norm(x, axis=-1) / norm)
        for x, norm in zip(pairs, (QUERY_NORM, CENTROID_NORM), strict=True)
    ]
    of_key, of_query = 1.5 * units[1] * pairs[0].sum(-1)[:, None], 0.5 * units[0][:, None] * pairs[1].sum(-1)
    return 2 * 2**0.5 * (of_key + of_query) + 1e-5 * np.abs(q @ keys.T)


@settings(max_examples=40)
@given(
    st.sampled_from([(16, 1), (64, 1), (64, 2), (128, 1), (80, 5), (256, 2)]),
    st.integers(0, 1000),
    st.floats(0, 3),
    st.integers(1, 5),
)
def test_scores_are_off_by_roundings_only(sizes: tuple[int, int], seed: int, spread: float, group: int) -> None:
    """However far the pairs of queries and centroids are spread over magnitudes."""
    dim, m = sizes
    random = np.random.default_rng(seed)
    scale = 10 ** random.uniform(-spread, spread, (2, dim)).astype(np.float32)
    index = coded(normal(m, 40, dim // m, seed=seed) * scale[0].reshape(m, 1, -1), 150, dim)
    q = normal(1, group, dim, seed=seed + 1) * scale[1]
    keys = decoded(index)[0]
    error = np.abs(index.scores(q)[0] - inner_products(q, keys[None])[0])
    # a sub-space has a unit of its own, so one for the whole key is never the finer one
    assert (error <= bound(q[0], keys)).all(), (error / bound(q[0], keys)).max()


@pytest.mark.parametrize(("dim", "m"), [(64, 1), (128, 1), (256, 1), (64, 2), (128, 4), (256, 8)])
@pytest.mark.parametrize("angle", [0.0, 0.25, 0.785, 2.0])
def test_no_sum_overflows_where_every_pair_is_as_long_as_can_be(dim: int, m: int, angle: float) -> None:
    """Each product is the largest that there is, all of one sign: the query is the key, at one phase in all pairs."""
    half = dim // m // 2
    line = np.concatenate([np.full(half, np.cos(angle)), np.full(half, np.sin(angle))]).astype(np.float32)
    index = coded(np.stack([line, -line, 0 * line])[None].repeat(m, 0), 300, dim)
    keys = decoded(index)[0]
    q = keys[::3].copy()  # at their own positions turned alike
    found = index.scores(np.ascontiguousarray(q[None]))[0]
    wanted = inner_products(q[None], keys[None])[0]
    assert np.abs(wanted).max() == pytest.approx(dim / 2, rel=1e-3)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * dim / 2)


@pytest.mark.parametrize("n_numbers", [2, 128, 512, 8192])
def test_the_limits_leave_room_for_roundings(n_numbers: int) -> None:
    """Half a unit a number of a query; of a key, half in the codebook and half for each of two products."""
    query, key = QUERY_NORM + 0.5 * n_numbers**0.5, CENTROID_NORM + 1.5 * n_numbers**0.5
    assert query * key < 2**31
    assert LONGEST_PAIR + 2 * 1.5 < 2**15


def test_a_centroid_far_from_all_others_does_not_make_them_coarse() -> None:
    lines = normal(1, 40, 32)
    plain = coded(lines, 80, 32)
    lines[0, 7] *= 1e6
    index, q = coded(lines, 80, 32), normal(1, 3, 32, seed=1)
    others = np.arange(80) % 40 != 7
    np.testing.assert_array_equal(index.scores(q)[..., others], plain.scores(q)[..., others])


def test_an_attention_factor_scales_scores() -> None:
    lines, q = normal(1, 40, 32), normal(1, 3, 32, seed=1)
    plain, gained = coded(lines, 80, 32), coded(lines, 80, 32, gain=1.25)
    np.testing.assert_allclose(gained.scores(q), 1.25 * plain.scores(q), rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e18])
def test_queries_of_any_size(size: float) -> None:
    index, q = coded(normal(1, 40, 32), 80, 32), normal(1, 3, 32, seed=1)
    wanted = index.scores(q)
    np.testing.assert_allclose(index.scores(q * np.float32(size)), wanted * np.float32(size), rtol=1e-3, atol=0)


def test_centroids_of_zeros_stay_zeros() -> None:
    short = short_centroids(np.zeros((1, 1, 3, 8), np.float32))
    assert not short.table.any()
    assert np.isfinite(short.units).all()
