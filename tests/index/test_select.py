from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.select import quickselect, select_top_k
from tests.index.oracles import normal, top_rows


def select(scores: Any, k: int) -> tuple[Any, Any]:
    scores = np.asarray(scores, np.float32)
    n, room = len(scores), max(min(k, len(scores)), 1)
    rows, picked = np.full(room + 9, -7, np.int64), np.full(room + 9, -7, np.float32)
    count = select_top_k(scores, k, np.empty(n + 1, np.int32), np.empty(max(n, 1), np.float32), rows, picked)
    assert (rows[room:] == -7).all(), "wrote behind the rows asked for"
    assert (picked[room:] == -7).all(), "wrote behind the rows asked for"
    return rows[:count], picked[:count]


def assert_selects(scores: Any, k: int) -> None:
    scores = np.asarray(scores, np.float32)
    rows, picked = select(scores, k)
    expected = top_rows(np.where(np.isnan(scores), -np.inf, scores), k)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(picked, scores[expected])


@given(
    st.lists(st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=60),
    st.integers(1, 70),
)
def test_ties_and_infinities(scores: list[float], k: int) -> None:
    assert_selects(scores, k)


@given(st.integers(1, 6000), st.integers(0, 5), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_many_shapes_of_data(n: int, shape: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = [
        lambda: rng.standard_normal(n),
        lambda: np.exp(20 * rng.standard_normal(n)),
        lambda: rng.integers(0, 3, n),
        lambda: np.where(rng.random(n) < 0.9, -np.inf, rng.random(n)),
        lambda: np.sort(rng.random(n)),
        lambda: -np.sort(rng.random(n)),
    ][shape]()
    assert_selects(data, 1 + int(share * n))


@pytest.mark.parametrize("value", [0.0, -np.inf, 1e30])
@pytest.mark.parametrize("n", [1, 100, 5000])
def test_all_equal(value: float, n: int) -> None:
    for k in (1, n // 2 + 1, n, n + 1):
        assert_selects(np.full(n, value), k)


@pytest.mark.parametrize("seen", [-100.0, 100.0])
@pytest.mark.parametrize("n", [32_768, 40_000])
def test_a_sample_that_misleads(n: int, seen: float) -> None:
    """It sees none but the smallest, or none but the largest: the bracket lies far off, on either side."""
    scores = normal(n)
    size = min(max(n // 16, 512), 2048)
    i, stride = np.arange(size), n // size
    scores[i * stride + (i * 7919) % stride] += seen
    for k in (1, 10, size - 1, size, size + 1, 3000, n // 2, n - size - 1, n - size, n - 5):
        assert_selects(scores, k)


@given(st.integers(2048, 50_000), st.integers(0, 3), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_brackets_of_many_scores(n: int, shape: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = [
        lambda: rng.standard_normal(n),
        lambda: np.exp(15 * rng.standard_normal(n)),
        lambda: rng.integers(0, 40, n),
        lambda: np.where(rng.random(n) < 0.3, np.nan, np.round(rng.standard_normal(n), 2)),
    ][shape]()
    assert_selects(data, 1 + int(share * n))


def test_nan_counts_as_least() -> None:
    scores = normal(4000)
    scores[::3] = np.nan
    for k in (5, 2000, 3000, 3999):
        assert_selects(scores, k)


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=80), st.data())
def test_quickselect_finds_the_kth(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    work = np.array(values, np.float32)
    assert quickselect(work, len(values), k) == sorted(np.array(values, np.float32))[-k]
    assert sorted(work) == sorted(np.array(values, np.float32))
