from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError, IndexNotTrainedError
from kvstore.index.base import Index
from kvstore.index.registry import make_index
from kvstore.index.rope import RopeSpec
from kvstore.index.scalar import ScalarIndex
from kvstore.index.spread import usual_range
from kvstore.index.threads import kernel_threads
from tests.contracts.index import DIM, HEADS, IndexContract
from tests.index.in_store import attends_through
from tests.index.oracles import inner_products, normal

both = pytest.mark.parametrize("bits", [4, 8])


class ScalarContract(IndexContract):
    def test_one_huge_key_does_not_spoil_the_rest(self) -> None:
        """The huge key is clamped, so that its own score is not kept; that of the others is."""
        keys, q = normal(HEADS, 200, DIM), normal(HEADS, 3, DIM, seed=1)
        keys[:, 13] *= 1e4
        index = self.make()
        index.train(keys)
        index.add(keys)
        others = np.delete(np.arange(200), 13)
        scores, exact = index.scores(q), inner_products(q, keys)
        assert np.isfinite(scores).all()
        error = np.abs(scores - exact)[:, :, others].mean()
        assert error < 0.3 * np.abs(exact[:, :, others]).mean()


class TestFourBits(ScalarContract):
    def make(self, **settings: Any) -> Index:
        return make_index("sq4", HEADS, DIM, **settings)


class TestEightBits(ScalarContract):
    def make(self, **settings: Any) -> Index:
        return make_index("sq8", HEADS, DIM, **settings)


def trained(keys: Any, bits: int) -> ScalarIndex:
    index = ScalarIndex(len(keys), keys.shape[2], bits=bits)
    index.train(keys)
    index.add(keys)
    index._check()
    return index


@both
@pytest.mark.parametrize("head_dim", [1, 17, 64, 256])
def test_scores_are_products_with_decoded_keys(bits: int, head_dim: int) -> None:
    keys, q = normal(2, 150, head_dim), normal(2, 3, head_dim, seed=1)
    index = trained(keys, bits)
    decoded = index.decode()
    np.testing.assert_allclose(index.scores(q), inner_products(q, decoded), rtol=1e-4, atol=1e-4 * head_dim**0.5)
    assert index.code_bytes_per_key == -(-head_dim * bits // 8)
    steps = (keys.max(1) - keys.min(1)) / (2**bits - 1)
    assert (np.abs(decoded - keys) <= 0.501 * steps[:, None]).all()


@both
def test_a_constant_channel_is_kept(bits: int) -> None:
    keys = normal(1, 40, 16)
    keys[:, :, 5] = 3.25
    index = trained(keys, bits)
    assert (index.decode()[:, :, 5] == 3.25).all()
    far = keys + np.float32(1e30)
    index.add(far)
    assert (index.decode()[:, 40:, 5] == 3.25).all()
    assert np.isfinite(index.scores(normal(1, 2, 16))).all()


@both
def test_later_keys_are_clamped_to_the_range_of_training(bits: int) -> None:
    keys = normal(1, 300, 16)
    index = trained(keys, bits)
    low, high = usual_range(keys)
    index.add(keys * 100)
    decoded = index.decode()[:, 300:]
    np.testing.assert_allclose(decoded.min(1), low, rtol=1e-5)
    np.testing.assert_allclose(decoded.max(1), high, rtol=1e-5)


@both
def test_any_number_of_threads_gives_the_same_bits(bits: int) -> None:
    keys, q = normal(3, 9000, 16), normal(3, 3, 16)
    answers = []
    for threads in (1, 2):
        with kernel_threads(threads):
            index = trained(keys, bits)
            answers.append((index.codes.copy(), index.scores(q)))
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    np.testing.assert_array_equal(answers[0][1], answers[1][1])


def test_more_bits_err_less() -> None:
    keys, q = normal(2, 500, 32), normal(2, 3, 32, seed=1)
    errors = [np.abs(trained(keys, bits).scores(q) - inner_products(q, keys)).mean() for bits in (4, 8)]
    assert errors[1] < errors[0] / 10


def test_the_usual_range_leaves_out_what_went_astray() -> None:
    keys = normal(1, 500, 4)
    keys[0, 7] = 1e6
    low, high = usual_range(keys)
    assert (high < 10).all()
    np.testing.assert_array_equal(low, keys.min(1))
    mostly_zero = np.zeros((1, 100, 1), np.float32)
    mostly_zero[0, 3] = 5
    assert usual_range(mostly_zero)[1] == 5


def test_settings_and_order_of_calls() -> None:
    with pytest.raises(ConfigError, match="4 or 8"):
        ScalarIndex(1, 8, bits=3)
    index = ScalarIndex(1, 8, bits=4, rope=RopeSpec.from_theta(1e4, 8), seed=3)
    assert not index.trained
    with pytest.raises(IndexNotTrainedError, match="train"):
        index.add(normal(1, 3, 8))
    assert index.describe() == {"kind": "sq4", "rows": 0, "bytes_per_key": 4.0, "bits": 4, "trained": False}


@pytest.mark.parametrize("kind", ["sq4", "sq8"])
def test_in_a_store(kind: str) -> None:
    assert attends_through(kind).kind == kind
