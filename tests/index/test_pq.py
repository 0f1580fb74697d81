"""Product quantization in both spaces."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import IndexNotTrainedError, InvalidQueryError, SchemaMismatchError
from kvstore.index.codebook import Codebook
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.threads import kernel_threads
from tests.index.oracles import inner_products, largest_product, nearest_centroids, normal

ROPES = {
    "half": RopeSpec.from_theta(1e4, 16),
    "interleaved": RopeSpec.from_theta(1e4, 16, "interleaved"),
    "partial": RopeSpec(RopeSpec.from_theta(1e4, 8).inv_freq, "half", attention_factor=1.25),
}
SETTINGS: list[dict[str, Any]] = [
    {"m": 2, "bits": 6},
    {"m": 2, "bits": 6, "pairs": False},
    {"m": 1, "bits": 8},
    {"m": 4, "bits": 8},
    {"m": 4, "bits": 2},
    {"m": 8, "bits": 5},
    *({"m": 1, "bits": 8, "rope": rope} for rope in ROPES.values()),
    {"m": 4, "bits": 4, "rope": ROPES["half"]},
    {"m": 2, "bits": 6, "rope": ROPES["partial"]},
]


def name_of(chosen: dict[str, Any]) -> str:
    rope = next((name for name, spec in ROPES.items() if spec is chosen.get("rope")), "raw")
    return f"{chosen['m']}x{chosen['bits']}-{rope}-{'pairs' if chosen.get('pairs', True) else 'contiguous'}"


every_setting = pytest.mark.parametrize("chosen", SETTINGS, ids=name_of)


def build(keys: Any, positions: Any = None, **chosen: Any) -> PQIndex:
    index = PQIndex(keys.shape[0], keys.shape[2], **chosen)
    index.train(keys, positions)
    index.add(keys, positions)
    index._check()
    return index


def decoded(index: PQIndex) -> Any:
    rows = np.arange(index.first_row, index.stop_row)
    return np.stack([index.decode(h, rows) for h in range(index.n_kv_heads)])


@every_setting
@pytest.mark.parametrize("n", [1, 3, 200])
def test_scores_are_inner_products_with_decoded_keys(chosen: dict[str, Any], n: int) -> None:
    index = build(normal(2, n, 16), np.arange(n) * 3 + 50_000, **chosen)
    q = normal(2, 3, 16, seed=1)
    expected = inner_products(q, decoded(index))
    largest = np.abs(expected).max() if index.space == "raw" else 0.5 * largest_product(q, decoded(index))
    np.testing.assert_allclose(index.scores(q), expected, rtol=1e-4, atol=1e-4 * largest)


@settings(max_examples=25)
@given(st.integers(1, 150), st.integers(0, 2**20), st.integers(0, 1000), st.floats(-3, 3))
def test_scores_equal_decoded_products_for_any_rows(n: int, position: int, seed: int, log_size: float) -> None:
    keys = normal(1, n, 16, seed=seed) * np.float32(10**log_size)
    for chosen in (SETTINGS[0], SETTINGS[-1]):
        index = build(keys, np.arange(position, position + n), **chosen)
        q = normal(1, 3, 16, seed=seed + 1)
        expected = inner_products(q, decoded(index))
        largest = np.abs(expected).max() if index.space == "raw" else 0.5 * largest_product(q, decoded(index))
        np.testing.assert_allclose(index.scores(q), expected, rtol=1e-4, atol=1e-4 * largest)


@every_setting
def test_codes_name_the_nearest_centroids(chosen: dict[str, Any]) -> None:
    """Decoding is linear and an isometry (up to the attention factor), so nearest before is nearest after."""
    keys = normal(2, 150, 16)
    index = build(keys, **chosen)
    index.add(normal(2, 40, 16, seed=9))
    error = ((decoded(index)[:, 150:] - normal(2, 40, 16, seed=9)) ** 2).sum(-1)
    m, k = index.layout.m, index.codebook.k
    for word in range(min(k, 5)):  # no other code may come closer
        codes = np.full((2, 40, m), word)
        words = np.zeros((2, 40, index.layout.n_words), index.layout.word_dtype)
        for j in range(m):
            shift = index.layout.bits * (j % index.layout.per_word)
            words[..., j // index.layout.per_word] |= (codes[..., j] << shift).astype(words.dtype)
        other = index.clone()
        other.truncate(150)
        other.add_codes(words)
        worse = ((decoded(other)[:, 150:] - normal(2, 40, 16, seed=9)) ** 2).sum(-1)
        if chosen.get("rope") is not ROPES["partial"]:  # there gains weigh pairs differently before and after
            assert (worse >= error * (1 - 1e-4)).all()


def test_codes_of_appended_rows_against_brute_force() -> None:
    index = build(normal(2, 300, 16), m=2, bits=6, pairs=False)
    fresh = normal(2, 50, 16, seed=4)
    index.add(fresh)
    words = index.codes[:, 300:, 0].astype(int)
    for h in range(2):
        for j in range(2):
            part = fresh[h][:, j * 8 : (j + 1) * 8]
            distances = nearest_centroids(part, index.codebook.centroids[h, j])
            chosen = (words[h] >> (6 * j)) & 63
            np.testing.assert_allclose(distances[np.arange(50), chosen], distances.min(1), rtol=1e-4)


@pytest.mark.parametrize("rope", [None, ROPES["half"]], ids=["raw", "rope"])
def test_error_does_not_rise_with_m_or_bits(rope: RopeSpec | None) -> None:
    keys = normal(1, 400, 16)

    def error(m: int, bits: int) -> float:
        return float(((decoded(build(keys, m=m, bits=bits, rope=rope)) - keys) ** 2).sum())

    by_m = [error(m, 4) for m in (1, 2, 4, 8)]
    by_bits = [error(2, bits) for bits in (1, 2, 4, 6, 8)]
    for errors in (by_m, by_bits):
        assert all(b <= a * 1.001 for a, b in itertools.pairwise(errors)), errors


@pytest.mark.parametrize("chosen", [SETTINGS[0], SETTINGS[6]], ids=name_of)
def test_the_same_bits_with_any_number_of_threads(chosen: dict[str, Any]) -> None:
    keys = normal(2, 1500, 16)
    states = []
    for threads in (1, 2):
        with kernel_threads(threads):
            index = build(keys, seed=3, **chosen)
            found = index.search(normal(2, 3, 16), 200, scale=0.25)
        states.append((index.codebook.centroids, index.codes, found.rows, found.scores, found.log_norm))
    for one, two in zip(*states, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("chosen", [SETTINGS[0], SETTINGS[6]], ids=name_of)
def test_rows_added_one_by_one_get_the_codes_of_a_batch(chosen: dict[str, Any]) -> None:
    keys = normal(2, 1100, 16)  # enough for the parallel kernel
    index = build(keys, **chosen)
    other = PQIndex(2, 16, codebook=index.codebook, **chosen)
    for t in range(60):
        other.add(np.ascontiguousarray(keys[:, t : t + 1]))
    other.add(np.ascontiguousarray(keys[:, 60:]))
    np.testing.assert_array_equal(other.codes, index.codes)
    assert len(other._runs.offsets) == 1


def test_fewer_rows_than_centroids_are_kept_exactly() -> None:
    for chosen in (SETTINGS[0], SETTINGS[3], SETTINGS[6]):
        keys = normal(2, 9, 16)
        index = build(keys, **chosen)
        assert index.codebook.k == 9
        np.testing.assert_allclose(decoded(index), keys, rtol=1e-4, atol=1e-4)


def test_a_constant_in_a_channel_does_not_change_the_search() -> None:
    keys = normal(1, 300, 16)
    shifted = keys.copy()
    shifted[:, :, 5] += 7
    q = normal(1, 1, 16)
    before, after = build(keys, m=2, bits=6), build(shifted, m=2, bits=6)
    difference = after.scores(q) - before.scores(q)
    np.testing.assert_allclose(difference, 7 * q[0, 0, 5], atol=0.05)


def test_a_shared_codebook() -> None:
    index = build(normal(2, 300, 16))
    other = PQIndex(2, 16, codebook=index.codebook)
    assert other.trained
    other.add(normal(2, 300, 16))
    np.testing.assert_array_equal(other.codes, index.codes)
    assert other.nbytes == other._codes.nbytes < index.nbytes
    restored = PQIndex(2, 16, codebook=Codebook(index.codebook.centroids.copy()))
    restored.add_codes(index.codes, index.positions)
    q = normal(2, 3, 16)
    np.testing.assert_array_equal(restored.scores(q), index.scores(q))


def test_a_warm_start_lowers_the_error() -> None:
    keys = normal(1, 500, 16)
    index = build(keys, iterations=1)
    first = ((decoded(index) - keys) ** 2).sum()
    index.train(keys, warm=True)
    index.add(keys)
    assert ((decoded(index) - keys) ** 2).sum() < first


def test_untrained() -> None:
    index = PQIndex(1, 16)
    assert not index.trained
    for call in (
        lambda: index.add(normal(1, 3, 16)),
        lambda: index.codebook,
        lambda: index.train(normal(1, 3, 16), warm=True),
    ):
        with pytest.raises(IndexNotTrainedError, match="train"):
            call()
    assert index.search(normal(1, 2, 16), 3, scale=1.0).rows.shape == (1, 0)


def test_foreign_codes_and_codebooks_are_refused() -> None:
    index = build(normal(2, 9, 16))
    with pytest.raises(SchemaMismatchError, match="uint16"):
        index.add_codes(index.codes.astype(np.uint8))
    with pytest.raises(SchemaMismatchError, match="number of centroids"):
        index.add_codes(np.full((2, 1, 1), 9, np.uint16))
    with pytest.raises(SchemaMismatchError, match="the index needs"):
        PQIndex(1, 16, codebook=index.codebook)
    with pytest.raises(SchemaMismatchError, match="none of them 0"):
        Codebook(np.zeros((1, 1, 0, 4), np.float32))
    for head, row in ((2, 0), (-1, 0), (0, 9), (0, -1)):
        with pytest.raises(InvalidQueryError):
            index.decode(head, np.array([row]))
    assert index.n_rows == 9


def test_buffers_double() -> None:
    for bits, expected in ((8, {200, 400}), (6, {128, 256})):  # packed codes grow by blocks
        index = build(normal(1, 100, 16), m=2, bits=bits)
        sizes = set()
        for _ in range(150):
            index.add(normal(1, 1, 16))
            sizes.add(index._codes.room_rows)
        assert sizes == expected
        assert index.n_rows == 250


@pytest.mark.parametrize("head_dim", [2, 80, 256])
@pytest.mark.parametrize("rope", [False, True], ids=["raw", "rope"])
def test_head_dims(head_dim: int, rope: bool) -> None:
    keys, q = normal(1, 70, head_dim), normal(1, 3, head_dim)
    index = build(keys, m=1, bits=8, rope=RopeSpec.from_theta(1e4, head_dim) if rope else None)
    expected = inner_products(q, decoded(index))
    largest = 0.5 * largest_product(q, decoded(index)) if rope else np.abs(expected).max()
    np.testing.assert_allclose(index.scores(q), expected, rtol=1e-4, atol=1e-4 * largest)
