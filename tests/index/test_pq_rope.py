"""Keys coded before RoPE."""

from typing import Any

import numpy as np
import pytest

from kvstore.index.encode_kernels import arrange
from kvstore.index.layout import Layout
from kvstore.index.phases import position_phases, rope_tables
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from tests.index.oracles import inner_products, normal, rotate
from tests.index.test_pq import ROPES, build, decoded

every_rope = pytest.mark.parametrize("rope", list(ROPES.values()), ids=list(ROPES))


def unrotated(keys: Any, positions: Any, rope: RopeSpec) -> Any:
    layout = Layout.of(keys.shape[1], 1, 8, True, rope)
    tables = rope_tables(rope, keys.shape[1])
    turns = position_phases(tables, positions)
    out, line = np.empty_like(keys), np.empty(keys.shape[1], np.float32)
    for t in range(len(keys)):
        arrange(keys[t], layout.order_array, turns, t, (1 / tables.gains).astype(np.float32), 0, line)
        out[t, layout.order_array] = line
    return out


@every_rope
@pytest.mark.parametrize("position", [0, 63, 127, 4090, 16_380, 1_000_000])
def test_unrotated_keys_are_the_originals(rope: RopeSpec, position: int) -> None:
    before, positions = normal(80, 16), np.arange(position, position + 80)
    stored = rotate(before, positions, rope).astype(np.float32)
    np.testing.assert_allclose(unrotated(stored, positions, rope), before, atol=2e-6)


@every_rope
def test_codes_do_not_depend_on_positions(rope: RopeSpec) -> None:
    before = normal(2, 200, 16)
    index = PQIndex(2, 16, m=2, bits=6, rope=rope)
    index.train(before, np.zeros(200, np.int64))
    codes = []
    for first in (0, 1, 77, 40_000):
        positions = np.arange(first, first + 200)
        index.truncate(0)
        index.add(rotate(before, positions, rope).astype(np.float32), positions)
        codes.append(index.codes.copy())
    same = [(other == codes[0]).mean() for other in codes[1:]]
    assert min(same) > 0.99, same  # rounding may turn a near tie


@every_rope
def test_scores_at_other_positions_are_those_of_turned_keys(rope: RopeSpec) -> None:
    before = normal(1, 40, 16)
    index = build(before, np.zeros(40, np.int64), m=2, bits=6, rope=rope)  # 40 rows: every key its own centroid
    moved = PQIndex(1, 16, m=2, bits=6, rope=rope, codebook=index.codebook)
    positions = np.arange(9000, 9040)
    stored = rotate(before, positions, rope).astype(np.float32)
    gained = rotate(before, np.zeros(40), rope).astype(np.float32)
    index.truncate(0)
    index.train(gained, np.zeros(40, np.int64))
    moved = PQIndex(1, 16, m=2, bits=6, rope=rope, codebook=index.codebook)
    moved.add(stored, positions)
    q = normal(1, 3, 16)
    np.testing.assert_allclose(moved.scores(q), inner_products(q, stored), rtol=1e-3, atol=1e-3)


def test_runs_of_positions() -> None:
    rope = ROPES["half"]
    positions = np.concatenate([np.arange(10, 80), np.arange(500, 620), [7, 7, 6, 5], np.arange(16_300, 16_500)])
    keys = normal(2, len(positions), 16)
    index = build(keys, positions, m=1, bits=8, rope=rope)
    assert len(index._runs.offsets) == 7
    np.testing.assert_array_equal(index.positions, positions)
    q = normal(2, 3, 16)
    expected = inner_products(q, decoded(index))
    scores = index.scores(q)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    for start, stop in [(0, 1), (69, 71), (70, 190), (191, 195), (60, 394), (393, 394)]:
        np.testing.assert_array_equal(index.scores(q, start=start, stop=stop), scores[:, :, start:stop])


def test_a_trained_codebook_serves_later_positions() -> None:
    """Where raw codes drift: keys alike before RoPE, seen later in the text."""
    rope = RopeSpec.from_theta(1e4, 16)
    kinds = normal(1, 20, 16)[:, np.arange(2000) % 20]
    positions = np.arange(2000)
    stored = rotate(kinds, positions, rope).astype(np.float32)
    errors = {}
    for name, settings in {"raw": {"space": "raw"}, "rope": {"space": "rope"}}.items():
        index = PQIndex(1, 16, m=1, bits=5, rope=rope, iterations=20, **settings)  # type: ignore[arg-type]
        index.train(np.ascontiguousarray(stored[:, :500]), positions[:500])
        index.add(stored, positions)
        errors[name] = ((decoded(index)[:, 1500:] - stored[:, 1500:]) ** 2).sum()
    assert errors["rope"] < 0.05 * errors["raw"]


@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_groups(group: int) -> None:
    index = build(normal(1, 130, 16), m=1, bits=8, rope=ROPES["half"])
    q = normal(1, group, 16)
    expected = inner_products(q, decoded(index))
    np.testing.assert_allclose(index.scores(q), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
