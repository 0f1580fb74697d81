from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.index.code_rows import CodeRows
from kvstore.index.layout import Layout, pair_dims
from kvstore.index.packed_rows import PackedRows
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.runs import Runs
from tests.index.oracles import normal

WORDS = {"1x8": (1, 8), "2x6": (2, 6), "4x6": (4, 6), "3x5": (3, 5), "16x8": (16, 8), "8x3": (8, 3)}


@pytest.mark.parametrize(
    ("m", "bits", "n_bytes"),
    [
        *((m, 8, m) for m in (1, 2, 4, 8, 16)),
        *((m, 7, m) for m in (1, 2)),
        *((2, 6, 1.5), (4, 6, 3), (1, 6, 1), (3, 6, 3), (2, 5, 1.5)),
        *((2, 4, 1), (16, 4, 8), (3, 3, 2), (8, 2, 2), (8, 1, 1)),
    ],
)
def test_bytes_of_a_key(m: int, bits: int, n_bytes: float) -> None:
    index = PQIndex(2, 96, m=m, bits=bits)
    assert index.code_bytes_per_key == n_bytes
    index.train(normal(2, 300, 96))
    index.add(normal(2, 256, 96))
    assert index.codes.nbytes >= index._codes.nbytes == 2 * 256 * n_bytes


def test_packed_words_are_for_scans_of_keys_as_stored() -> None:
    """Before RoPE a scan reads a key's words at a time, so there they stay whole."""
    rope = RopeSpec.from_theta(1e4, 16)
    assert PQIndex(1, 16, m=2, bits=6, rope=rope).code_bytes_per_key == 2
    assert PQIndex(1, 16, m=2, bits=6, rope=rope, space="raw").code_bytes_per_key == 1.5


def test_pairs_stay_together() -> None:
    layout = Layout.of(16, 4, 8, True, None)
    for part in np.reshape(layout.order, (4, 4)):
        assert (part[2:] - part[:2] == 8).all()
    interleaved = Layout.of(16, 4, 8, True, RopeSpec.from_theta(1e4, 16, "interleaved"))
    for part in np.reshape(interleaved.order, (4, 4)):
        assert (part[2:] - part[:2] == 1).all()
    assert Layout.of(16, 4, 8, False, None).order == tuple(range(16))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_dimensions_that_rope_leaves_alone_are_paired_too(layout: str) -> None:
    first, second = pair_dims(12, RopeSpec.from_theta(1e4, 8, layout))
    assert sorted([*first, *second]) == list(range(12))
    assert (first[-2:].tolist(), second[-2:].tolist()) == ([8, 9], [10, 11])


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="odd"):
        PQIndex(1, 15)
    with pytest.raises(ConfigError, match=r"m = 3 does not divide 8 RoPE pairs; m may be 1, 2, 4, 8"):
        PQIndex(1, 16, m=3)
    assert PQIndex(1, 15, m=3, pairs=False).layout.sub_dim == 5
    for bits in (0, 9):
        with pytest.raises(ConfigError, match="bits"):
            PQIndex(1, 16, bits=bits)
    with pytest.raises(ConfigError, match="rotary"):
        PQIndex(1, 16, rope=RopeSpec.from_theta(1e4, 32))
    with pytest.raises(ConfigError, match="rope="):
        PQIndex(1, 16, space="rope")
    with pytest.raises(ConfigError, match="'cosine'"):
        PQIndex(1, 16, space="cosine")
    with pytest.raises(ConfigError, match="iterations"):
        PQIndex(1, 16, iterations=0)


def test_defaults() -> None:
    assert (PQIndex(1, 16).space, PQIndex(1, 16).layout.m, PQIndex(1, 16).layout.bits) == ("raw", 2, 6)
    rope = PQIndex(1, 16, rope=RopeSpec.from_theta(1e4, 16))
    assert (rope.space, rope.layout.m, rope.layout.bits) == ("rope", 1, 8)


def test_runs_give_back_any_positions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        runs, expected = Runs(), np.empty(0, np.int64)
        for _ in range(6):
            start = int(expected[-1]) + 1 if len(expected) and rng.random() < 0.5 else int(rng.integers(0, 50))
            piece = np.cumsum(rng.choice([1, 1, 1, 5], rng.integers(0, 8))) + start - 1
            runs.append(piece)
            expected = np.concatenate([expected, piece])
            if rng.random() < 0.3:
                keep = int(rng.integers(0, len(expected) + 1))
                runs.truncate(keep)
                expected = expected[:keep]
            np.testing.assert_array_equal(runs.at(np.arange(runs.n_rows)), expected)
            assert runs.n_rows == len(expected)
        assert len(runs.offsets) == (np.diff(expected) != 1).sum() + (len(expected) > 0)


def words_of(layout: Layout, n: int, seed: int) -> Any:
    drawn = np.random.default_rng(seed).integers(0, 1 << (layout.bits * layout.per_word), (2, n, layout.n_words))
    return drawn.astype(layout.word_dtype)


def assert_holds(rows: CodeRows, words: Any) -> None:
    n = words.shape[1]
    np.testing.assert_array_equal(rows.words(n), words)
    places = np.random.default_rng(n).integers(0, max(n, 1), 9 if n else 0)
    np.testing.assert_array_equal(rows.at(slice(None), places), words[:, places])
    np.testing.assert_array_equal(rows.at(1, places), words[1, places])


@pytest.mark.parametrize("kind", [CodeRows, PackedRows])
@pytest.mark.parametrize("sizes", [(2, 6), (4, 6), (2, 5), (1, 6)], ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1)), min_size=1, max_size=5))
def test_words_come_back_for_any_number_of_rows(kind: Any, sizes: Any, steps: list[tuple[int, float]]) -> None:
    """Appended, cut off, written over, copied: a copy and what it was made from go separate ways."""
    layout = Layout.of(24, *sizes, False, None)
    rows, expected = kind(2, layout), words_of(layout, 0, 0)
    if kind is PackedRows:
        expected = expected.astype(np.uint16)
    for seed, (n, share) in enumerate(steps):
        added = words_of(layout, n, seed).astype(expected.dtype)
        rows.write(expected.shape[1], added)
        expected = np.concatenate([expected, added], 1)
        assert_holds(rows, expected)
        twin, whole = rows.copy(expected.shape[1]), expected
        expected = expected[:, : int(share * expected.shape[1])]
        rows.write(expected.shape[1], added)
        assert_holds(twin, whole)
        rows.write(expected.shape[1], whole[:, expected.shape[1] :])
        assert_holds(rows, whole)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_codes_of_an_index_round_trip(name: str, n: int) -> None:
    m, bits = WORDS[name]
    index = PQIndex(2, 48, m=m, bits=bits, pairs=False)
    index.train(normal(2, 300, 48))
    words = words_of(index.layout, n, n)
    if m % index.layout.per_word:  # the last word is not full
        words[..., -1] &= (1 << bits) - 1
    index.add_codes(words)
    np.testing.assert_array_equal(index.codes, words)
    twin = index.clone()
    twin.truncate(n // 2)
    twin.add_codes(index.codes[:, : n - n // 2])
    np.testing.assert_array_equal(twin.codes[:, n // 2 :], words[:, : n - n // 2])
    np.testing.assert_array_equal(index.codes, words)
    twin._check()


@pytest.mark.parametrize("name", ["2x6", "4x6"])
def test_any_range_of_packed_rows_is_scanned_alike(name: str) -> None:
    m, bits = WORDS[name]
    index = PQIndex(2, 16, m=m, bits=bits)
    index.train(normal(2, 700, 16))
    index.add(normal(2, 9000, 16))  # several tiles
    q = normal(2, 3, 16, seed=1)
    whole = index.scores(q)
    for start, stop in ((0, 1), (0, 9000), (127, 129), (1, 4097), (4095, 4225), (8999, 9000), (130, 250)):
        np.testing.assert_array_equal(index.scores(q, start=start, stop=stop), whole[:, :, start:stop])
