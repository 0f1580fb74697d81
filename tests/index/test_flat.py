from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import SchemaMismatchError
from kvstore.index.flat import FlatIndex
from kvstore.index.rows import DTYPE_CODES, RowView
from tests.index.oracles import assert_top, group_scores, inner_products, normal


def table_in_blocks(keys: torch.Tensor, block_tokens: int) -> RowView:
    """Cut keys [n_kv_heads, n, head_dim] into blocks that lie apart, in no order."""
    heads, n, dim = keys.shape
    n_blocks = -(-n // block_tokens)
    room = torch.zeros(2 * n_blocks + 1, heads, block_tokens, dim, dtype=keys.dtype)
    slots = np.random.default_rng(0).permutation(2 * n_blocks)[:n_blocks]
    for block, slot in enumerate(slots):
        part = keys[:, block * block_tokens : (block + 1) * block_tokens]
        room[int(slot), :, : part.shape[1]] = part
    item = keys.element_size()
    return RowView(
        block_addresses=np.array([room[int(slot)].data_ptr() for slot in slots], np.int64),
        n_rows=n,
        n_kv_heads=heads,
        head_dim=dim,
        block_tokens=block_tokens,
        head_stride_bytes=block_tokens * dim * item,
        row_stride_bytes=dim * item,
        dtype_code=DTYPE_CODES[str(keys.dtype).removeprefix("torch.")],
        owner=room,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [1, 16, 512])
def test_scores_of_rows_in_blocks(dtype: torch.dtype, block_tokens: int) -> None:
    keys = torch.from_numpy(normal(2, 333, 16)).to(dtype)
    view = table_in_blocks(keys, block_tokens)
    index = FlatIndex.over(view, 5, 333)
    q = normal(2, 3, 16, seed=1)
    expected = inner_products(q, keys.double().numpy())[:, :, 5:]
    np.testing.assert_allclose(index.scores(q, view), expected, rtol=1e-5, atol=1e-5)
    found = index.search(q, 20, view, scale=0.25)
    for h in range(2):
        assert_top(found.rows[h] - 5, group_scores(expected, 0.25, "sum_softmax")[h], 20, 1e-4)


@pytest.mark.parametrize("head_dim", [1, 7, 24, 128])
def test_head_dims(head_dim: int) -> None:
    keys, q = normal(1, 40, head_dim), normal(1, 3, head_dim)
    view = RowView.of(keys)
    scores = FlatIndex.over(view, 0, 40).scores(q, view)
    np.testing.assert_allclose(scores, inner_products(q, keys), rtol=1e-4, atol=1e-4)


def test_a_constant_in_a_channel_of_all_keys_does_not_change_the_answer() -> None:
    keys, q = normal(1, 200, 16), normal(1, 3, 16)
    shifted = keys.copy()
    shifted[:, :, 3] += 4
    rows: list[Any] = []
    for table in (keys, shifted):
        view = RowView.of(table)
        rows.append(FlatIndex.over(view, 0, 200).search(q, 20, view, scale=0.25).rows)
    np.testing.assert_array_equal(*rows)


def test_long_tables_are_cut_into_chunks() -> None:
    keys, q = normal(1, 9001, 16), normal(1, 3, 16)
    view = RowView.of(keys)
    index = FlatIndex.over(view, 1, 9001)
    expected = inner_products(q, keys)[:, :, 1:]
    np.testing.assert_allclose(index.scores(q, view), expected, rtol=1e-4, atol=1e-4)
    for reduce in ("sum_softmax", "max", "mean"):
        found = index.search(q, 900, view, scale=0.25, reduce=reduce)
        assert_top(found.rows[0] - 1, group_scores(expected, 0.25, reduce)[0], 900, 1e-4)


def test_views_that_do_not_fit_are_refused() -> None:
    keys, q = normal(2, 10, 16), normal(2, 3, 16)
    index = FlatIndex.over(RowView.of(keys), 0, 10)
    for view in (None, RowView.of(keys[:1]), RowView.of(keys[:, :, :8]), RowView.of(keys[:, :9])):
        with pytest.raises(SchemaMismatchError):
            index.search(q, 3, view, scale=1.0)
    for start, stop in ((0, 11), (-1, 3), (4, 3)):
        with pytest.raises(SchemaMismatchError, match="holds rows"):
            FlatIndex.over(RowView.of(keys), start, stop)


def test_it_is_exact_and_keeps_nothing() -> None:
    index = FlatIndex(2, 16)
    index.add(normal(2, 10, 16))
    assert index.exact
    assert index.trained
    assert index.nbytes == index.code_bytes_per_key == 0
