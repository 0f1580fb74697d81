from typing import Any

import numpy as np
import pytest

from kvstore.errors import IndexNotTrainedError
from kvstore.index.base import Index
from kvstore.index.rabitq import RaBitQIndex, random_rotation
from kvstore.index.registry import make_index
from kvstore.index.threads import kernel_threads
from tests.contracts.index import DIM, HEADS, IndexContract
from tests.index.in_store import attends_through
from tests.index.oracles import inner_products, normal


class TestRaBitQ(IndexContract):
    def make(self, **settings: Any) -> Index:
        return make_index("rabitq", HEADS, DIM, **settings)

    def test_one_huge_key_does_not_spoil_the_rest(self) -> None:
        """Errors are a share of a key's own distance from the centre, which one key cannot move."""
        keys, q = normal(HEADS, 200, DIM), normal(HEADS, 3, DIM, seed=1)
        plain, scores, exact = keys.copy(), [], inner_products(q, keys)
        keys[:, 13] *= 1e4
        for table in (plain, keys):
            index = self.make()
            index.train(table)
            index.add(table)
            scores.append(index.scores(q))
        assert np.isfinite(scores[1]).all()
        others = np.delete(np.arange(200), 13)
        errors = [np.abs(s - exact)[:, :, others].mean() for s in scores]
        assert errors[1] < 1.1 * errors[0]


def trained(keys: Any, seed: int = 0) -> RaBitQIndex:
    index = RaBitQIndex(len(keys), keys.shape[2], seed=seed)
    index.train(keys)
    index.add(keys)
    index._check()
    return index


@pytest.mark.parametrize("head_dim", [1, 17, 40, 256])
def test_scores_are_those_of_the_formula(head_dim: int) -> None:
    keys, q = normal(2, 60, head_dim) + 1, normal(2, 3, head_dim, seed=1)
    index = trained(keys)
    rotation = random_rotation(head_dim, 0).astype(np.float64)
    centre = keys.astype(np.float64).mean(1, keepdims=True)
    residual = (keys - centre) @ rotation
    signs = np.where(residual > 0, 1.0, -1.0)
    factors = (residual**2).sum(2) / np.abs(residual).sum(2)
    expected = inner_products(q, centre) + inner_products(q @ rotation, signs) * factors[:, None]
    np.testing.assert_allclose(index.scores(q), expected, rtol=1e-4, atol=1e-4 * head_dim**0.5)
    assert index.code_bytes_per_key == -(-head_dim // 8) + 4


def test_the_rotation_is_orthogonal_and_its_own_for_each_seed() -> None:
    rotation = random_rotation(48, 3)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(48), atol=1e-5)
    assert not np.allclose(rotation, random_rotation(48, 4))
    assert random_rotation(48, 3) is rotation


def test_the_estimator_is_unbiased_over_rotations() -> None:
    keys, q, seeds = normal(1, 20, 32), normal(1, 2, 32, seed=1), 400
    scores = np.array([trained(keys, seed).scores(q) for seed in range(seeds)], np.float64)
    standard_error = scores.std(0) / seeds**0.5
    off = (scores.mean(0) - inner_products(q, keys)) / standard_error
    assert np.abs(off).max() < 4.5  # the largest of 40 normal numbers
    assert abs(off.mean()) < 0.6


def test_the_error_falls_with_the_root_of_the_dimension() -> None:
    """Its size is that of the paper's bound: sqrt(pi / 2 - 1) |o| |q| / sqrt(head_dim - 1)."""
    for head_dim in (16, 64, 256):
        keys, q = normal(2, 800, head_dim), normal(2, 3, head_dim, seed=1)
        error = trained(keys).scores(q) - inner_products(q, keys)
        norms = np.linalg.norm(q, axis=2)[:, :, None] * np.linalg.norm(keys, axis=2)[:, None]
        size = np.sqrt((error / norms).var() * (head_dim - 1))
        assert size == pytest.approx(np.sqrt(np.pi / 2 - 1), rel=0.1)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    keys, q = normal(3, 9000, 16), normal(3, 3, 16)
    answers = []
    for threads in (1, 2):
        with kernel_threads(threads):
            index = trained(keys)
            answers.append((index.codes.copy(), index.scores(q)))
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    np.testing.assert_array_equal(answers[0][1], answers[1][1])


def test_a_key_at_the_centre_scores_as_the_centre() -> None:
    keys = np.concatenate([normal(1, 1, 8), -normal(1, 1, 8), np.zeros((1, 1, 8), np.float32)], axis=1)
    assert trained(keys).scores(normal(1, 1, 8, seed=2))[0, 0, 2] == pytest.approx(0, abs=1e-6)


def test_settings_and_order_of_calls() -> None:
    index = RaBitQIndex(1, 20, seed=3)
    with pytest.raises(IndexNotTrainedError, match="train"):
        index.add(normal(1, 3, 20))
    assert index.describe() == {
        "kind": "rabitq", "rows": 0, "bytes_per_key": 7.0, "bits": 1, "seed": 3, "trained": False
    }  # fmt: skip


def test_in_a_store() -> None:
    assert attends_through("rabitq").kind == "rabitq"
