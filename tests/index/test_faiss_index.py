import sys
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError, IndexNotTrainedError
from kvstore.index.base import Index
from kvstore.index.faiss_index import FaissIndex
from kvstore.index.registry import make_index
from tests.contracts.index import DIM, HEADS, IndexContract
from tests.index.in_store import attends_through
from tests.index.oracles import inner_products, normal

faiss = pytest.importorskip("faiss", reason="compared with FAISS")
FACTORIES = ["Flat", "SQ8", "PQ4x4", "IVF4,Flat", "HNSW8", "OPQ4,PQ4x4", "PCA8,SQfp16"]


class TestExactCodes(IndexContract):
    def make(self, **settings: Any) -> Index:
        return make_index("faiss", HEADS, DIM, factory="Flat", **settings)


class TestProductCodes(IndexContract):
    def make(self, **settings: Any) -> Index:
        return make_index("faiss", HEADS, DIM, factory="PQ4x4", **settings)

    def test_one_huge_key_does_not_spoil_the_rest(self) -> None:
        """Whether it has a centroid of its own is up to FAISS' draw of the first centroids."""
        keys = normal(HEADS, 200, DIM)
        keys[:, 13] *= 1e4
        index = self.make()
        index.train(keys)
        index.add(keys)
        assert np.isfinite(index.scores(normal(HEADS, 3, DIM))).all()


def filled(keys: Any, factory: str) -> FaissIndex:
    index = FaissIndex(len(keys), keys.shape[2], factory=factory)
    index.train(keys)
    index.add(keys)
    index._check()
    return index


@pytest.mark.parametrize("factory", FACTORIES)
def test_scores_are_products_with_what_faiss_gives_back(factory: str) -> None:
    keys, q = normal(2, 300, 16), normal(2, 3, 16, seed=1)
    index = filled(keys, factory)
    decoded = np.stack([head.reconstruct_n(0, 300) for head in index._heads])
    np.testing.assert_allclose(index.scores(q), inner_products(q, decoded), rtol=1e-4, atol=1e-4)
    close = np.corrcoef(index.scores(q).ravel(), inner_products(q, keys).ravel())[0, 1]
    assert close > (0.6 if "x4" in factory or "PCA" in factory else 0.99)


@pytest.mark.parametrize("factory", FACTORIES)
def test_rows_leave_and_come_back_in_order(factory: str) -> None:
    keys, q = normal(1, 120, 16), normal(1, 2, 16, seed=1)
    index = filled(keys, factory)
    before = index.scores(q)
    twin = index.clone()
    index.truncate(40)
    index._check()
    index.add(np.ascontiguousarray(keys[:, 40:]))
    index._check()
    np.testing.assert_allclose(index.scores(q), before, rtol=1e-5, atol=1e-5)
    index.truncate(0)
    index._check()
    np.testing.assert_array_equal(twin.scores(q), before)


def test_agrees_with_a_search_of_faiss() -> None:
    keys, q = normal(1, 500, 16), normal(1, 1, 16, seed=1)
    index = filled(keys, "SQ8")
    found = index.search(q, 20, scale=0.25)
    _, expected = index._heads[0].search(q[0], 20)
    np.testing.assert_array_equal(found.rows[0], np.sort(expected[0]))


def test_long_tables_are_decoded_in_chunks() -> None:
    keys, q = normal(1, 9001, 16), normal(1, 3, 16, seed=1)
    scores = filled(keys, "Flat").scores(q, start=7, stop=9000)
    np.testing.assert_allclose(scores, inner_products(q, keys)[:, :, 7:9000], rtol=1e-4, atol=1e-4)


def test_the_number_of_threads_of_faiss_is_put_back() -> None:
    before = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(2)
        index = filled(normal(1, 50, 16), "PQ4x4")
        index.scores(normal(1, 2, 16))
        index.truncate(10)
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)


def test_settings_and_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'Nonsense'"):
        FaissIndex(1, 16, factory="Nonsense")
    with pytest.raises(ConfigError, match="PQ3x8"):
        FaissIndex(1, 16, factory="PQ3x8").train(normal(1, 300, 16))
    index = FaissIndex(1, 16, factory="SQ8", seed=3)
    with pytest.raises(IndexNotTrainedError, match="train"):
        index.add(normal(1, 3, 16))
    assert index.describe() == {
        "kind": "faiss", "rows": 0, "bytes_per_key": 16.0, "factory": "SQ8", "seed": 3, "trained": False
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match="pip install faiss-cpu"):
        FaissIndex(1, 16)


def test_in_a_store() -> None:
    assert attends_through("faiss", factory="PQ4x4").kind == "faiss"
