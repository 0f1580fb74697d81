"""Rows that come and go, for the kinds that keep a line of codes for each."""

from typing import Any

import numpy as np
import pytest

from kvstore.index.registry import make_index
from tests.index.oracles import normal

KINDS = [("sq4", {}), ("sq8", {}), ("rabitq", {}), ("page", {"page_tokens": 1}), ("page", {"page_tokens": 8})]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_any_coming_and_going_ends_as_adding_once(kind: str, options: dict[str, Any]) -> None:
    rng, q = np.random.default_rng(1), normal(2, 3, 16, seed=1)
    pool = normal(2, 100, 16)
    index = make_index(kind, 2, 16, first_row=3, **options)
    index.train(pool)
    empty = index.clone()
    rows: list[int] = []
    for what in rng.integers(4, size=60):
        if what == 0:
            keep = int(rng.integers(len(rows) + 1)) // 8 * 8  # pages forget when they are cut where they begin
            index.truncate(3 + keep)
            rows = rows[:keep]
        elif what == 1:
            index = index.clone()
        else:
            more = rng.integers(100, size=rng.integers(20)).tolist()
            index.add(np.ascontiguousarray(pool[:, more]))
            rows += more
        index._check()
        assert (index.n_rows, index.stop_row) == (len(rows), 3 + len(rows))
        once = empty.clone()
        once.add(np.ascontiguousarray(pool[:, rows]))
        np.testing.assert_array_equal(index.scores(q), once.scores(q))
    assert empty.n_rows == 0


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_room_grows_by_doubling_and_is_accounted(kind: str, options: dict[str, Any]) -> None:
    index = make_index(kind, 2, 16, **options)
    index.train(normal(2, 30, 16))
    empty = index.nbytes
    for t in range(100):
        index.add(normal(2, 1, 16, seed=t))
    codes = 2 * index.code_bytes_per_key
    assert 100 * codes <= index.nbytes - empty <= 128 * codes
