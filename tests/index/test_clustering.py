import itertools
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError, NonFiniteError
from kvstore.index.clustering import kmeans
from kvstore.index.nearest import columns, nearest
from kvstore.index.threads import kernel_threads
from tests.index.oracles import nearest_centroids, normal


def assign(points: Any, centroids: Any) -> Any:
    laid, offsets = columns(centroids)
    indexes, products = np.empty(4, np.int32), np.empty(4, np.float32)
    found = []
    for first in range(0, len(points), 4):
        nearest(points, first, laid, offsets, indexes, products)
        found.extend(indexes[: len(points) - first])
    return np.array(found)


def inertia(points: Any, centroids: Any) -> float:
    return float(nearest_centroids(points, centroids).min(1).sum())


def blobs(n: int, d: int, k: int, seed: int = 0) -> Any:
    return normal(k, d, seed=seed)[np.arange(n) % k] * 4 + normal(n, d, seed=seed + 1)


@pytest.mark.parametrize(("n", "d", "k"), [(1, 1, 1), (7, 3, 5), (130, 16, 33), (64, 40, 64), (50, 8, 256)])
def test_nearest_is_the_nearest(n: int, d: int, k: int) -> None:
    points, centroids = normal(n, d), normal(k, d, seed=1)
    distances = nearest_centroids(points, centroids)
    chosen = assign(points, centroids)
    np.testing.assert_allclose(distances[np.arange(n), chosen], distances.min(1), rtol=1e-4, atol=1e-5)


def test_equal_centroids_give_the_first() -> None:
    assert (assign(normal(9, 5), np.repeat(normal(1, 5), 70, 0)) == 0).all()


def test_a_row_is_assigned_alike_in_any_batch() -> None:
    points, centroids = normal(500, 24), normal(200, 24, seed=1)
    together = assign(points, centroids)
    assert [assign(points[i : i + 1], centroids)[0] for i in range(500)] == together.tolist()


def test_centroids_are_means_of_their_points() -> None:
    points = blobs(400, 6, 5)
    centroids = kmeans(points, 5, iterations=100)
    labels = nearest_centroids(points, centroids).argmin(1)
    for j in range(5):
        np.testing.assert_allclose(centroids[j], points[labels == j].mean(0), rtol=1e-4, atol=1e-5)


def test_inertia_falls_with_iterations_and_with_k() -> None:
    points = normal(2000, 8)
    by_iterations = [inertia(points, kmeans(points, 32, iterations=i)) for i in (1, 2, 4, 8, 16)]
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(by_iterations))
    by_k = [inertia(points, kmeans(points, k, iterations=8)) for k in (1, 4, 16, 64)]
    assert all(b < a for a, b in itertools.pairwise(by_k))


def test_as_good_as_scikit_learn() -> None:
    cluster = pytest.importorskip("sklearn.cluster", reason="compared with scikit-learn")
    points = blobs(3000, 16, 40)
    start = points[np.random.default_rng(3).choice(3000, 64, replace=False)]
    ours = kmeans(points, 64, iterations=10, init=start)
    theirs = cluster.KMeans(64, init=start, n_init=1, max_iter=10, tol=0.0, algorithm="lloyd")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.fit(points)
    assert inertia(points, ours) <= 1.01 * inertia(points, theirs.cluster_centers_)


def test_the_same_bits_with_any_number_of_threads() -> None:
    points = normal(2, 3, 700, 8)
    results = []
    for threads in (1, 2):
        with kernel_threads(threads):
            results.append(kmeans(points, 16, iterations=6, seed=5))
    np.testing.assert_array_equal(*results)
    assert (results[0] != kmeans(points, 16, iterations=6, seed=6)).any()


def test_sets_do_not_depend_on_each_other() -> None:
    points = normal(3, 200, 4)
    together = kmeans(points, 8, iterations=4, init=points[:, :8])
    for i in range(3):
        np.testing.assert_array_equal(together[i], kmeans(points[i], 8, iterations=4, init=points[i, :8]))


def test_fewer_points_than_centroids_are_their_own_centroids() -> None:
    points = normal(5, 3)
    centroids = kmeans(points, 16)
    assert centroids.shape == (5, 3)
    assert inertia(points, centroids) == 0
    assert kmeans(points[:1], 4).tolist() == points[:1].tolist()


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
def test_equal_points(value: float) -> None:
    assert inertia(np.full((50, 3), value, np.float32), kmeans(np.full((50, 3), value, np.float32), 7)) == 0


def test_empty_clusters_are_refilled() -> None:
    points = np.concatenate([normal(90, 4), normal(10, 4) + 100])
    start = np.concatenate([points[:1], np.full((7, 4), 1e6, np.float32)])  # seven that nothing is near
    centroids = kmeans(points, 8, iterations=10, init=start)
    assert len(np.unique(nearest_centroids(points, centroids).argmin(1))) == 8


def test_an_outlier_does_not_take_the_others_along() -> None:
    points = normal(500, 4)
    points[7] *= 1e4
    centroids = kmeans(points, 32, iterations=8)
    assert np.isfinite(centroids).all()
    rest = np.delete(points, 7, 0)
    assert inertia(rest, centroids) < 0.5 * (rest**2).sum()


def test_a_warm_start_continues() -> None:
    points = normal(800, 8)
    four = kmeans(points, 16, iterations=4)
    np.testing.assert_array_equal(kmeans(points, 16, iterations=2, init=kmeans(points, 16, iterations=2)), four)


def test_a_sample_is_enough() -> None:
    points = blobs(5000, 4, 8)
    sampled = kmeans(points, 8, iterations=10, sample_per_centroid=40)
    assert inertia(points, sampled) < 1.6 * inertia(points, kmeans(points, 8, iterations=10))


def test_bad_input() -> None:
    for points in (np.empty((0, 3), np.float32), np.empty((3, 0), np.float32), np.zeros(4, np.float32)):
        with pytest.raises(ValueError, match="points must be"):
            kmeans(points, 2)
    with pytest.raises(NonFiniteError):
        kmeans(np.array([[np.nan], [1.0]], np.float32), 2)
    with pytest.raises(ConfigError, match="iterations"):
        kmeans(normal(4, 2), 2, iterations=0)
    with pytest.raises(ValueError, match="init"):
        kmeans(normal(4, 2), 2, init=normal(3, 2))
    with pytest.raises(NonFiniteError, match="init"):
        kmeans(normal(4, 2), 2, init=np.full((2, 2), np.inf, np.float32))
