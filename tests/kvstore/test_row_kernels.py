"""Kernels that go by address, beside numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.rows import DTYPE_CODES
from kvstore.kernels.few_rows import copy_few_rows, finite_kernel
from kvstore.kernels.row_kernels import (
    MAX_VECTOR_DIM,
    TILE_ROWS,
    list_addresses,
    row_adder,
    row_scorer,
    vector_dim,
)
from kvstore.schema import DTYPES
from tests.builders import random

DIMS = [4, 8, 12, 24, 64, 80, 128]  # a vector of 8, a vector of 16 and neither
GROUPS = [1, 2, 3, 4, 5, 7]


def rows_of(dim, dtype, seed):
    """Rows of a block with gaps, and where they begin: [n, dim] and int64 [n]."""
    rows = random((100, dim), seed, DTYPES[dtype])
    return rows, rows.data_ptr() + np.arange(100) * dim * rows.element_size()


def listed(addresses, chosen):
    """Addresses of chosen rows as kernels take them, the last of them again to fill a four."""
    out = np.full(TILE_ROWS + 4, -1, np.int64)
    out[: len(chosen)] = addresses[chosen]
    out[len(chosen) : len(chosen) + -len(chosen) % 4] = addresses[chosen[-1]]
    return out


@settings(max_examples=60)
@given(
    st.sampled_from(DIMS), st.sampled_from(sorted(DTYPES)), st.sampled_from(GROUPS), st.integers(1, TILE_ROWS),
    st.integers(0, 2), st.integers(0, 99),
)  # fmt: skip
def test_scores_are_inner_products_and_nothing_beside_them_is_written(dim, dtype, group, n, column, seed):
    rows, addresses = rows_of(dim, dtype, seed)
    chosen = np.random.default_rng(seed).integers(0, 100, n)
    q = random((group, dim), seed + 1).numpy()
    scores = np.full((group, 8 + n + -n % 4 + 4), np.float32(7))
    score = row_scorer(vector_dim(dim), DTYPE_CODES[dtype], group)
    there = listed(addresses, chosen)
    score(there, n, there, n, dim * rows.element_size(), q, 4 * column, scores)
    expected = q.astype(np.float64) @ rows.double().numpy()[chosen].T
    np.testing.assert_allclose(scores[:, 4 * column : 4 * column + n], expected, rtol=2e-5, atol=2e-5)
    assert (scores[:, : 4 * column] == 7).all()
    assert (scores[:, 4 * column + n + -n % 4 :] == 7).all()


@settings(max_examples=60)
@given(
    st.sampled_from(DIMS), st.sampled_from(sorted(DTYPES)), st.sampled_from(GROUPS), st.integers(0, TILE_ROWS),
    st.integers(0, 99),
)  # fmt: skip
def test_weighted_rows_are_added_to_what_is_there(dim, dtype, group, n, seed):
    rows, addresses = rows_of(dim, dtype, seed)
    chosen = np.random.default_rng(seed).integers(0, 100, n)
    weights = random((group, TILE_ROWS), seed + 1).numpy()
    sums = random((group, dim), seed + 2).numpy()
    expected = sums + weights[:, :n].astype(np.float64) @ rows.double().numpy()[chosen]
    there = listed(addresses, chosen) if n else np.empty(0, np.int64)
    add = row_adder(vector_dim(dim), DTYPE_CODES[dtype], group)
    add(there, n, there, 0, dim * rows.element_size(), weights, sums)
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)


def test_a_weight_of_zero_does_not_spread_what_is_infinite_in_other_rows():
    rows, addresses = rows_of(64, "float32", seed=1)
    rows[9] = float("inf")  # not among those added
    sums = np.zeros((3, 64), np.float32)
    there = listed(addresses, np.arange(9))
    row_adder(64, DTYPE_CODES["float32"], 3)(there, 9, there, 0, 256, np.ones((3, TILE_ROWS), np.float32), sums)
    assert np.isfinite(sums).all()


def test_sizes_of_whole_vectors_have_kernels_of_their_own():
    assert [vector_dim(dim) for dim in (8, 64, 80, MAX_VECTOR_DIM)] == [8, 64, 80, MAX_VECTOR_DIM]
    assert [vector_dim(dim) for dim in (4, 20, MAX_VECTOR_DIM + 8)] == [0, 0, 0]


def test_addresses_follow_the_table_of_blocks():
    blocks = np.array([1_000, 9_000, 5_000], np.int64)
    out = np.empty(12, np.int64)
    list_addresses(blocks.ctypes.data, 2, 100, 10, np.array([0, 5, 11, 8, 3]), out)  # blocks of 4 rows
    assert out[:8].tolist() == [1_100, 9_110, 5_130, 5_100, 1_130, 1_130, 1_130, 1_130]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype, bad):
    finite = finite_kernel(DTYPE_CODES[dtype])
    x = random((2, 3, 5, 12), 1, DTYPES[dtype])[:, :, ::2]
    strides = [stride * x.element_size() for stride in x.stride()[:3]]
    assert finite(x.data_ptr(), tuple(strides), tuple(x.shape))
    for place in np.ndindex(*x.shape):
        if sum(place) % 3 == 0:
            kept = x[place].clone()
            x[place] = bad
            assert not finite(x.data_ptr(), tuple(strides), tuple(x.shape)), place
            x[place] = kept
    assert finite(x.data_ptr(), tuple(strides), tuple(x.shape))


def test_few_rows_are_copied_and_nothing_beside_them():
    source, home = random((3, 7, 16), 1), torch.zeros(3, 8, 16)
    item = 4
    copy_few_rows(
        source.data_ptr() + 2 * 16 * item, (7 * 16 * item, 16 * item),
        home.data_ptr() + 3 * 16 * item, (8 * 16 * item, 16 * item), (3, 4, 16 * item),
    )  # fmt: skip
    expected = torch.zeros(3, 8, 16)
    expected[:, 3:7] = source[:, 2:6]
    assert torch.equal(home, expected)
