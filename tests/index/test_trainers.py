"""FAISS as another trainer of the same K-Means, and so a judge of ours."""

import sys
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.index import RopeSpec, kmeans, make_index
from kvstore.index.pq import PQIndex
from tests.index.oracles import nearest_centroids, normal

faiss = pytest.importorskip("faiss", reason="compared with FAISS")

ROPE = RopeSpec.from_theta(1e4, 16)


def inertia(points: Any, centroids: Any) -> float:
    return float(nearest_centroids(points, centroids).min(1).sum())


def blobs(n: int, d: int, k: int) -> Any:
    return normal(k, d)[np.arange(n) % k] * 2 + normal(n, d, seed=1)  # overlapping: few optima


@pytest.mark.parametrize(("n", "d", "k"), [(2000, 8, 32), (4000, 16, 64), (3000, 2, 256)])
@pytest.mark.parametrize("make", [normal, lambda n, d: blobs(n, d, 40)], ids=["normal", "blobs"])
def test_ours_and_theirs_are_as_good(n: int, d: int, k: int, make: Any) -> None:
    """From the same points, so that only the algorithm differs; a local optimum may be a few percent off another."""
    points = make(n, d)
    start = points[np.random.default_rng(3).choice(n, k, replace=False)]
    ours, theirs = (
        inertia(points, kmeans(points, k, iterations=12, init=start, trainer=trainer)) for trainer in ("numba", "faiss")
    )
    assert ours <= 1.03 * theirs
    assert theirs <= 1.03 * ours


@pytest.mark.parametrize("rope", [None, ROPE], ids=["raw", "rope"])
@pytest.mark.parametrize(("m", "bits"), [(2, 6), (1, 8), (4, 4)])
def test_codebooks_are_as_good(m: int, bits: int, rope: RopeSpec | None) -> None:
    keys = normal(2, 1500, 16)
    errors = []
    for trainer in ("numba", "faiss"):
        index = PQIndex(2, 16, m=m, bits=bits, rope=rope, iterations=8, trainer=trainer)
        index.train(keys)
        index.add(keys)
        index._check()
        errors.append(float(index.errors(keys, np.arange(1500)).sum()))
    ours, theirs = errors
    assert ours <= 1.03 * theirs
    assert theirs <= 1.03 * ours


def test_the_same_seed_gives_the_same_bits_and_threads_stay() -> None:
    points = normal(2, 500, 8)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        one, two = (kmeans(points, 16, seed=5, trainer="faiss") for _ in range(2))
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)
    np.testing.assert_array_equal(one, two)
    assert (one != kmeans(points, 16, seed=6, trainer="faiss")).any()
    keys, codes = normal(2, 300, 16), []
    for _ in range(2):
        index = make_index("pq", 2, 16, trainer="faiss", seed=3)
        index.train(keys)
        index.add(keys)
        assert isinstance(index, PQIndex)
        codes.append(index.codes)
    np.testing.assert_array_equal(*codes)


def test_few_points_warm_starts_and_batches(capfd: pytest.CaptureFixture[str]) -> None:
    points = normal(5, 3)
    assert inertia(points, kmeans(points, 16, trainer="faiss")) == 0
    assert kmeans(normal(2, 3, 40, 4), 8, trainer="faiss").shape == (2, 3, 8, 4)
    keys = normal(1, 400, 16)
    index = PQIndex(1, 16, trainer="faiss", iterations=1)
    index.train(keys)
    index.add(keys)
    first = index.errors(keys, np.arange(400)).sum()
    index.train(keys, warm=True)
    index.add(keys)
    assert index.errors(keys, np.arange(400)).sum() < first
    index.train(keys[:, :9], warm=True)  # fewer rows than centroids to start from
    assert index.codebook.k == 64
    assert capfd.readouterr() == ("", "")  # FAISS warns of few points on the process's own stderr


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (lambda name: PQIndex(1, 16, trainer=name), lambda name: kmeans(normal(9, 2), 2, trainer=name)):
        with pytest.raises(ConfigError, match=r"'numba', 'faiss', not 'torch'"):
            make("torch")
    monkeypatch.setitem(sys.modules, "faiss", None)
    for make in (lambda name: PQIndex(1, 16, trainer=name), lambda name: kmeans(normal(9, 2), 2, trainer=name)):
        with pytest.raises(ConfigError, match=r"trainer='faiss' needs FAISS: pip install faiss-cpu"):
            make("faiss")
    PQIndex(1, 16).train(normal(1, 9, 16))
