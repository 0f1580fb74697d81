"""An index over some of a layer's KV heads answers what the index over all of them answers for these."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kvstore.index import RopeSpec, RowView, make_index
from tests.index.oracles import normal

HEADS, GROUP, DIM, ROWS = 4, 3, 16, 700
ROPE = RopeSpec.from_theta(1e4, DIM)
KINDS = {
    "flat": {},
    "pq raw": {"m": 2, "bits": 6, "seed": 5},
    "pq": {"rope": ROPE, "seed": 5},
    "pq pairs": {"rope": ROPE, "scan_pairs": 4},
    "pq faiss": {"trainer": "faiss", "seed": 5},
    "sq4": {},
    "rabitq": {"seed": 5},
    "page": {},
    "sparq": {},
    "faiss": {"factory": "PQ4x4", "seed": 5},
}


def answers(kind: str, settings: dict[str, Any], keys: Any, q: Any) -> list[Any]:
    """Scores of all rows and the best 60, of an index that was trained and then grew."""
    index = make_index(kind, len(keys), DIM, **settings)
    index.train(np.ascontiguousarray(keys[:, :500]))
    index.add(np.ascontiguousarray(keys[:, :500]))
    index.add(np.ascontiguousarray(keys[:, 500:]))
    index._check()
    view = RowView.of(np.ascontiguousarray(keys))
    found = index.search(q, 60, view, scale=0.25)
    return [index.scores(q, view), found.rows, found.scores, found.log_norm]


@pytest.mark.parametrize("name", KINDS)
def test_other_heads_make_no_difference(name: str) -> None:
    if "faiss" in name and find_spec("faiss") is None:
        pytest.skip("FAISS is not installed")
    kind, keys, q = name.partition(" ")[0], normal(HEADS, ROWS, DIM), normal(HEADS, GROUP, DIM, seed=1)
    whole = answers(kind, KINDS[name], keys, q)
    for heads in (slice(0, 2), slice(2, 4), slice(3, 4)):
        for part, expected in zip(answers(kind, KINDS[name], keys[heads], q[heads]), whole, strict=True):
            np.testing.assert_array_equal(part, expected[heads])
