"""Scans that look at the RoPE pairs with the most energy only."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.index.layout import pair_dims
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.threads import kernel_threads
from tests.index.oracles import assert_top, group_scores, inner_products, largest_product, normal
from tests.index.test_pq import ROPES, build, decoded

every_rope = pytest.mark.parametrize("rope", list(ROPES.values()), ids=list(ROPES))


def kept_pairs(index: PQIndex, q: Any, rope: RopeSpec, n_keep: int) -> list[list[int]]:
    """Pairs of each KV head that a scan should look at, by arithmetic in float64; q [n_kv_heads, group, d]."""
    first, second = pair_dims(index.head_dim, rope)
    gains = np.ones(len(first))
    gains[: len(rope.inv_freq)] = rope.attention_factor
    found = []
    for h in range(index.n_kv_heads):
        keep: list[int] = []
        for j, part in enumerate(index.codebook.centroids[h].astype(np.float64)):
            n_pairs = part.shape[1] // 2
            pairs = range(j * n_pairs, (j + 1) * n_pairs)
            size = np.sqrt((part[:, :n_pairs] ** 2 + part[:, n_pairs:] ** 2).mean(0))
            weight = [
                sum(np.hypot(q[h, g, first[p]], q[h, g, second[p]]) for g in range(q.shape[1]))
                * size[p - j * n_pairs] * gains[p]
                for p in pairs
            ]  # fmt: skip
            keep += [pairs[i] for i in np.argsort(-np.array(weight), kind="stable")[: n_keep // index.layout.m]]
        found.append(keep)
    return found


def expected(index: PQIndex, q: Any, rope: RopeSpec, n_keep: int) -> Any:
    """Products with the decoded keys, all other pairs of which are zero: RoPE turns each pair by itself."""
    first, second = pair_dims(index.head_dim, rope)
    keys = decoded(index)
    for h, keep in enumerate(kept_pairs(index, q, rope, n_keep)):
        others = [p for p in range(len(first)) if p not in keep]
        keys[h][:, first[others]] = keys[h][:, second[others]] = 0
    return inner_products(q, keys)


@every_rope
@pytest.mark.parametrize(("m", "bits", "n_keep"), [(1, 8, 3), (1, 8, 7), (2, 8, 4), (4, 8, 4), (2, 6, 2)])
def test_scores_are_products_over_the_pairs_with_the_most_energy(
    rope: RopeSpec, m: int, bits: int, n_keep: int
) -> None:
    keys = normal(2, 700, 16) * np.geomspace(0.1, 3, 16).astype(np.float32)
    index = build(keys, np.arange(700) * 2 + 4000, m=m, bits=bits, rope=rope, scan_pairs=n_keep)
    q = normal(2, 3, 16, seed=5)
    wanted = expected(index, q, rope, n_keep)
    np.testing.assert_allclose(index.scores(q), wanted, rtol=1e-4, atol=5e-5 * largest_product(q, decoded(index)))


@settings(max_examples=20)
@given(st.sampled_from([1, 4, 5]), st.integers(0, 1000), st.sampled_from([1, 3, 5]))
def test_any_number_of_pairs_and_query_heads(n_keep: int, seed: int, group: int) -> None:
    rope = ROPES["half"]
    index = build(normal(2, 100, 16, seed=seed), m=1, bits=8, rope=rope, scan_pairs=n_keep)
    q = normal(2, group, 16, seed=seed + 1)
    wanted = expected(index, q, rope, n_keep)
    np.testing.assert_allclose(index.scores(q), wanted, rtol=1e-4, atol=5e-5 * largest_product(q, decoded(index)))


def test_a_search_ranks_by_these_scores_after_rows_came_and_went() -> None:
    keys = normal(2, 900, 16)
    index = build(keys, m=1, bits=8, rope=ROPES["interleaved"], scan_pairs=3, first_row=5)
    index.truncate(505)
    index.add(keys[:, :300], np.arange(500, 800))
    q = normal(2, 3, 16, seed=1)
    weights = group_scores(index.scores(q).astype(np.float64), 0.25, "sum_softmax")
    for twin in (index, index.clone()):
        found = twin.search(q, 80, scale=0.25)
        for h in range(2):
            assert_top(found.rows[h] - 5, weights[h], 80, 1e-4)


def test_all_pairs_are_the_whole_scan_bit_for_bit() -> None:
    keys, q = normal(2, 300, 16), normal(2, 3, 16, seed=1)
    whole = build(keys, m=1, bits=8, rope=ROPES["half"])
    listed = build(keys, m=1, bits=8, rope=ROPES["half"], scan_pairs=8)
    np.testing.assert_array_equal(whole.scores(q), listed.scores(q))


def test_a_query_in_few_pairs_loses_nothing() -> None:
    rope = ROPES["half"]
    first, second = pair_dims(16, rope)
    q = np.zeros((1, 2, 16), np.float32)
    q[0, :, [first[1], second[1], first[6], second[6]]] = normal(4, 2)
    keys = normal(1, 500, 16)
    whole = build(keys, m=1, bits=8, rope=rope)
    few = build(keys, m=1, bits=8, rope=rope, scan_pairs=2)
    np.testing.assert_allclose(few.scores(q), whole.scores(q), rtol=1e-4, atol=1e-5)


def test_the_answer_does_not_depend_on_threads_or_on_other_searches() -> None:
    index = build(normal(3, 9000, 32), m=1, bits=8, rope=RopeSpec.from_theta(1e4, 32), scan_pairs=8)
    q, other = normal(3, 2, 32, seed=1), normal(3, 2, 32, seed=2)
    with kernel_threads(1):
        one = index.scores(q)
    index.scores(other)
    with kernel_threads(2):
        np.testing.assert_array_equal(index.scores(q), one)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scan_pairs": 0}, "multiple of m = 1, at most 8, not 0"),
        ({"scan_pairs": 9}, "at most 8, not 9"),
        ({"scan_pairs": 3, "m": 2}, "multiple of m = 2"),
        ({"scan_pairs": 4, "space": "raw"}, "needs space='rope'"),
    ],
)
def test_wrong_numbers_of_pairs_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PQIndex(1, 16, rope=ROPES["half"], **wrong)
