from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.index.base import Index
from kvstore.index.page import PageIndex
from kvstore.index.registry import make_index
from kvstore.index.threads import kernel_threads
from tests.contracts.index import DIM, HEADS, IndexContract
from tests.index.in_store import attends_through
from tests.index.oracles import inner_products, normal


class TestPagesOfOneRow(IndexContract):
    """As exact as the keys, so that nothing of the contract needs to be softened."""

    def make(self, **settings: Any) -> Index:
        return make_index("page", HEADS, DIM, page_tokens=1, **settings)


class PageContract(IndexContract):
    def test_one_huge_key_does_not_spoil_the_rest(self) -> None:
        """It spoils the other rows of its page, and none elsewhere."""
        keys, q = normal(HEADS, 200, DIM), normal(HEADS, 3, DIM, seed=1)
        index = self.make()
        index.add(keys)
        before = index.scores(q)
        keys[:, 13] *= 1e4
        index.truncate(0)
        index.add(keys)
        np.testing.assert_array_equal(index.scores(q)[:, :, 16:], before[:, :, 16:])
        assert np.isfinite(index.scores(q)).all()


class TestBounds(PageContract):
    def make(self, **settings: Any) -> Index:
        return make_index("page", HEADS, DIM, page_tokens=16, **settings)


class TestMeans(PageContract):
    """The contract cuts at 50 rows; a mean forgets only whole pages, hence pages of 2."""

    def make(self, **settings: Any) -> Index:
        return make_index("page", HEADS, DIM, page_tokens=2, digest="mean", **settings)


def filled(keys: Any, page_tokens: int, digest: str = "minmax") -> PageIndex:
    index = PageIndex(len(keys), keys.shape[2], page_tokens=page_tokens, digest=digest)
    index.add(keys)
    index._check()
    return index


def page_scores(keys: Any, q: Any, page_tokens: int, digest: str) -> Any:
    """float64 [heads, group, n], page by page."""
    out = np.empty((*q.shape[:2], keys.shape[1]))
    for low in range(0, keys.shape[1], page_tokens):
        page = keys[:, low : low + page_tokens].astype(np.float64)
        if digest == "mean":
            score = (q * page.mean(1)[:, None]).sum(2)
        else:
            score = np.maximum(q * page.min(1)[:, None], q * page.max(1)[:, None]).sum(2)
        out[:, :, low : low + page_tokens] = score[:, :, None]
    return out


@pytest.mark.parametrize("digest", ["minmax", "mean"])
@pytest.mark.parametrize(("n", "page_tokens", "head_dim"), [(1, 16, 16), (100, 7, 17), (64, 16, 256), (50, 64, 1)])
def test_scores_of_pages(digest: str, n: int, page_tokens: int, head_dim: int) -> None:
    keys, q = normal(2, n, head_dim), normal(2, 3, head_dim, seed=1)
    expected = page_scores(keys, q, page_tokens, digest)
    at_once = filled(keys, page_tokens, digest)
    np.testing.assert_allclose(at_once.scores(q), expected, rtol=1e-4, atol=1e-4)
    by_row = filled(keys[:, :0], page_tokens, digest)
    for t in range(n):
        by_row.add(np.ascontiguousarray(keys[:, t : t + 1]))
    by_row._check()
    np.testing.assert_array_equal(by_row.scores(q), at_once.scores(q))
    assert at_once.code_bytes_per_key == (8 if digest == "minmax" else 4) * head_dim / page_tokens


def test_no_row_scores_below_its_inner_product_even_after_cuts() -> None:
    keys, q = normal(2, 90, 16), normal(2, 3, 16, seed=1)
    index = filled(keys, 16)
    for n in (90, 87, 70, 65, 3):
        index.truncate(n)
        index._check()
        assert (index.scores(q) >= inner_products(q, keys[:, :n]) - 1e-4).all()
        kept = n // 16 * 16
        np.testing.assert_allclose(
            index.scores(q)[:, :, :kept], page_scores(keys[:, :kept], q, 16, "minmax"), rtol=1e-4, atol=1e-4
        )


def test_a_page_cut_in_two_keeps_its_mean_and_then_counts_right() -> None:
    keys, q = normal(1, 32, 16), normal(1, 2, 16, seed=1)
    index = filled(keys, 16, "mean")
    before = index.scores(q)
    index.truncate(20)
    np.testing.assert_allclose(index.scores(q), before[:, :, :20], rtol=1e-5, atol=1e-5)
    later = normal(1, 12, 16, seed=5)
    index.add(later)
    mean = (4 * keys[:, 16:].mean(1) + 12 * later.mean(1)) / 16
    np.testing.assert_allclose(index.scores(q)[0, :, -1], q[0] @ mean[0], rtol=1e-4, atol=1e-4)
    index.truncate(16)
    index.add(np.ascontiguousarray(keys[:, 16:]))
    np.testing.assert_array_equal(index.scores(q), before)


@pytest.mark.parametrize("digest", ["minmax", "mean"])
def test_whole_pages_are_taken_best_first(digest: str) -> None:
    keys, q = normal(2, 203, 16), normal(2, 3, 16, seed=1)
    index = filled(keys, 8, digest)
    found = index.search(q, 44, scale=0.25, start=5, stop=203)
    for rows in found.rows:
        pages, counts = np.unique(rows // 8, return_counts=True)
        sizes = np.where(pages == 0, 3, np.where(pages == 25, 3, 8))
        cut = counts < sizes
        assert cut.sum() <= 1
        for page in pages[cut]:  # what is left of a page cut at k are its first rows
            inside = rows[rows // 8 == page]
            np.testing.assert_array_equal(inside, max(5, page * 8) + np.arange(len(inside)))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    keys, q = normal(3, 9000, 16), normal(3, 3, 16)
    answers = []
    for threads in (1, 2):
        with kernel_threads(threads):
            answers.append(filled(keys, 16, "mean").scores(q))
    np.testing.assert_array_equal(*answers)


def test_settings() -> None:
    for wrong in ({"page_tokens": 0}, {"digest": "max"}):
        with pytest.raises(ConfigError):
            PageIndex(1, 8, **wrong)  # type: ignore[arg-type]
    assert PageIndex(1, 8, page_tokens=4).describe() == {
        "kind": "page", "rows": 0, "bytes_per_key": 16.0, "page_tokens": 4, "digest": "minmax"
    }  # fmt: skip


@pytest.mark.parametrize("digest", ["minmax", "mean"])
def test_in_a_store(digest: str) -> None:
    assert attends_through("page", page_tokens=8, digest=digest).kind == "page"
