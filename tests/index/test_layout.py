import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.index.layout import Layout, pair_dims
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.runs import Runs


@pytest.mark.parametrize(
    ("m", "bits", "n_bytes"),
    [(2, 6, 2), (1, 8, 1), (4, 8, 4), (4, 6, 4), (2, 4, 1), (8, 2, 2), (1, 6, 1), (3, 3, 2), (8, 1, 1), (2, 7, 2)],
)
def test_bytes_of_a_key(m: int, bits: int, n_bytes: int) -> None:
    assert Layout.of(48, m, bits, True, None).bytes_per_key == n_bytes


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
