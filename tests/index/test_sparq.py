from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import ConfigError, SchemaMismatchError
from kvstore.index.base import Index
from kvstore.index.registry import make_index
from kvstore.index.rows import RowView
from kvstore.index.sparq import SparQIndex
from kvstore.index.threads import kernel_threads
from tests.contracts.index import DIM, GROUP, HEADS, SCALE, IndexContract
from tests.index.in_store import attends_through
from tests.index.oracles import assert_top, group_scores, inner_products, normal
from tests.index.test_flat import table_in_blocks


class TestAllChannels(IndexContract):
    def make(self, **settings: Any) -> Index:
        return make_index("sparq", HEADS, DIM, **settings)


class TestSomeChannels(IndexContract):
    def make(self, **settings: Any) -> Index:
        return make_index("sparq", HEADS, DIM, rank=6, **settings)

    @pytest.mark.parametrize("group", [1, 2, 5])
    def test_any_group(self, group: int) -> None:
        """The heads of a group choose channels together, so that alone they may score otherwise."""
        index, _, view = self.filled(100)
        q = normal(HEADS, group, DIM, seed=3)
        found = index.search(q, 7, view, scale=SCALE)
        scores = index.scores(q, view).astype(np.float64)
        for h in range(HEADS):
            assert_top(found.rows[h], group_scores(scores, SCALE, "sum_softmax")[h], 7, 1e-4)

    def test_one_huge_key_does_not_spoil_the_rest(self) -> None:
        """No key has a part in another's score."""
        index, keys, view = self.filled(200)
        q = normal(HEADS, GROUP, DIM, seed=1)
        before = index.scores(q, view)
        keys[:, 13] *= 1e4
        after = index.scores(q, RowView.of(keys))
        others = np.delete(np.arange(200), 13)
        np.testing.assert_array_equal(after[:, :, others], before[:, :, others])
        np.testing.assert_allclose(after[:, :, 13], 1e4 * before[:, :, 13], rtol=1e-4)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def over(view: RowView, rank: int, start: int = 0) -> SparQIndex:
    index = SparQIndex(view.n_kv_heads, view.head_dim, rank=rank, first_row=start)
    index.add(np.zeros((view.n_kv_heads, view.n_rows - start, view.head_dim), np.float32))
    return index


@pytest.mark.parametrize(("rank", "head_dim"), [(4, 16), (3, 7), (64, 128), (1, 1)])
def test_the_softmax_is_that_of_the_paper(rank: int, head_dim: int) -> None:
    keys, q = normal(2, 120, head_dim), normal(2, 3, head_dim, seed=1)
    scores = over(RowView.of(keys), rank).scores(q, RowView.of(keys)).astype(np.float64)
    for h in range(2):
        chosen = np.argsort(-np.abs(q[h]).sum(0))[:rank]
        for g in range(3):
            share = np.abs(q[h, g, chosen]).sum() / np.abs(q[h, g]).sum()
            expected = softmax(keys[h][:, chosen] @ q[h, g, chosen] / np.sqrt(head_dim * share))
            np.testing.assert_allclose(softmax(scores[h, g] * head_dim**-0.5), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [1, 16, 512])
def test_rows_in_blocks(dtype: torch.dtype, block_tokens: int) -> None:
    keys = torch.from_numpy(normal(2, 333, 16)).to(dtype)
    view = table_in_blocks(keys, block_tokens)
    q = normal(2, 3, 16, seed=1)
    q[:, :, 5:] = 0  # then five channels say everything
    scores = over(view, 5, start=3).scores(q, view)
    np.testing.assert_allclose(scores, inner_products(q, keys.double().numpy())[:, :, 3:], rtol=1e-4, atol=1e-4)


def test_a_query_of_zeros_and_channels_of_equal_size() -> None:
    keys = normal(1, 30, 16)
    view = RowView.of(keys)
    index = over(view, 4)
    assert (index.scores(np.zeros((1, 2, 16), np.float32), view) == 0).all()
    ones = np.ones((1, 1, 16), np.float32)
    np.testing.assert_allclose(index.scores(ones, view)[0, 0], 2 * keys[0, :, :4].sum(1), rtol=1e-4, atol=1e-5)
    half = np.zeros((1, 2, 16), np.float32)  # the second head has nothing in the channels of the first
    half[0, 0, :4], half[0, 1, 9] = 5, 1
    assert (index.scores(half, view)[0, 1] == 0).all()


def test_any_number_of_threads_gives_the_same_bits() -> None:
    keys, q = normal(3, 9000, 16), normal(3, 3, 16)
    view, answers = RowView.of(keys), []
    for threads in (1, 2):
        with kernel_threads(threads):
            answers.append(over(view, 8).scores(q, view))
    np.testing.assert_array_equal(*answers)


def test_settings() -> None:
    with pytest.raises(ConfigError, match="rank"):
        SparQIndex(1, 8, rank=0)
    index = SparQIndex(1, 8, rank=99)
    assert index.describe() == {"kind": "sparq", "rows": 0, "bytes_per_key": 0.0, "rank": 8}
    assert index.needs_rows
    assert not index.exact
    index.add(normal(1, 3, 8))
    with pytest.raises(SchemaMismatchError, match="view"):
        index.search(normal(1, 1, 8), 2, scale=1.0)
    assert index.nbytes == 0


def test_in_a_store() -> None:
    assert attends_through("sparq", rank=8).kind == "sparq"
