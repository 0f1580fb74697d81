"""Loads, exp and the group reduction."""

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.index.fast_exp import fast_exp
from kvstore.index.jit import jit
from kvstore.index.loads import LOADERS, prefetch
from kvstore.index.reduce import REDUCTIONS, reduce_group
from kvstore.index.rows import DTYPE_CODES
from tests.index.oracles import group_scores, log_sum_exp, normal


@jit
def exp_all(x: Any, out: Any) -> Any:
    for i in range(x.shape[0]):
        out[i] = fast_exp(x[i])


def exp_of(x: Any) -> Any:
    x = np.asarray(x, np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    return out


def test_exp_is_close_over_its_whole_range() -> None:
    x = np.linspace(-86.9, 87.9, 200_001).astype(np.float32)
    error = exp_of(x) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 1e-6


def test_exp_of_special_values() -> None:
    np.testing.assert_array_equal(exp_of([-np.inf, -200, 0, 200, np.inf]), [0, 0, 1, np.inf, np.inf])
    assert np.isnan(exp_of([np.nan])).all()


@pytest.mark.parametrize("dtype", list(DTYPE_CODES))
def test_loads_read_what_torch_wrote(dtype: str) -> None:
    row = torch.cat([torch.tensor(normal(61)) * 100, torch.tensor([0.0, -0.0, 1e-6])]).to(getattr(torch, dtype))
    load = LOADERS[DTYPE_CODES[dtype]]

    @jit
    def copy(address: Any, out: Any) -> Any:
        prefetch(address)
        for i in range(out.shape[0]):
            out[i] = load(address, i)

    out = np.empty(64, np.float32)
    copy(row.data_ptr(), out)
    np.testing.assert_array_equal(out, row.float().numpy())


@pytest.mark.parametrize("reduce", list(REDUCTIONS))
@pytest.mark.parametrize(("group", "n"), [(1, 1), (3, 63), (2, 64), (4, 5000)])
def test_group_reduction(reduce: str, group: int, n: int) -> None:
    scores = normal(group, n, seed=2) * 20
    expected = group_scores(scores.astype(np.float64)[None], 0.5, reduce)[0]
    log_norm = np.empty(group, np.float32)
    work = scores.copy()
    reduce_group(work, np.float32(0.5), REDUCTIONS[reduce], log_norm)
    np.testing.assert_allclose(work[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_norm, log_sum_exp(0.5 * scores.astype(np.float64)), rtol=1e-6, atol=1e-5)


def test_softmax_does_not_overflow() -> None:
    work, log_norm = np.array([[3e37, 1e37, -3e37]], np.float32), np.empty(1, np.float32)
    reduce_group(work, np.float32(1.0), REDUCTIONS["sum_softmax"], log_norm)
    np.testing.assert_array_equal(work[0], [1, 0, 0])
