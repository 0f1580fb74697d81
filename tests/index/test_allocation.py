"""What a search allocates once its buffers are there; arrays that kernels make are counted too."""

from typing import Any

import numpy as np
import pytest

from kvstore.index import Candidates, RopeSpec, RowView, Workspace, make_index
from kvstore.index.jit import jit
from kvstore.index.threads import kernel_threads
from tests.allocations import peak_bytes
from tests.index.oracles import normal

HEADS, GROUP, DIM, N = 2, 3, 16, 20_000
ROPE = RopeSpec.from_theta(1e4, DIM)
LIMIT_BYTES = 8192
"""Python's own objects, lines of one row or one query, a tile of codes; rows, or an answer, would take far more."""


@jit(cache=False)
def scratch(n: Any) -> Any:
    line = np.empty(n, np.float32)
    line[:] = n
    return line.sum()


def test_arrays_of_kernels_are_seen() -> None:
    """Numba takes them from Python's memory; without this the tests below would prove nothing."""
    assert 40_000 <= peak_bytes(lambda: scratch(10_000)) < 50_000


@pytest.mark.parametrize("k", [1, 2000])
@pytest.mark.parametrize("reduce", ["sum_softmax", "max", "mean"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("pq", {"space": "raw"}),
        ("pq", {"space": "raw", "m": 4, "bits": 8}),
        ("pq", {"rope": ROPE}),
        ("flat", {}),
        ("page", {}),
    ],
    ids=["raw-2x6", "raw-4x8", "rope-1x8", "flat", "page"],
)
def test_a_steady_search_allocates_nothing_that_grows(kind: str, settings: Any, k: int, reduce: str) -> None:
    keys, q = normal(HEADS, N, DIM), normal(HEADS, GROUP, DIM)
    index = make_index(kind, HEADS, DIM, workspace=Workspace(), **settings)
    index.train(np.ascontiguousarray(keys[:, :2000]))
    index.add(keys)
    view = RowView.of(keys) if index.needs_rows else None
    room = Candidates.room(HEADS, GROUP, k)
    with kernel_threads(1):  # scratch of a task is there once a thread
        assert peak_bytes(lambda: index.search(q, k, view, scale=0.25, reduce=reduce, out=room)) < LIMIT_BYTES


def test_a_search_that_grows_by_a_row_seldom_allocates() -> None:
    """Decoding adds a row a step: buffers have room ahead."""
    index = make_index("pq", HEADS, DIM, rope=ROPE, workspace=Workspace())
    index.train(normal(HEADS, 2000, DIM))
    index.add(normal(HEADS, N, DIM))
    q, row, room = normal(HEADS, GROUP, DIM), normal(HEADS, 1, DIM), Candidates.room(HEADS, GROUP, 100)

    def step() -> None:
        index.add(row)
        index.search(q, 100, scale=0.25, out=room)

    with kernel_threads(1):
        index.add(row)  # doubles the room for codes
        peaks = [peak_bytes(step) for _ in range(10)]
    assert max(peaks) < LIMIT_BYTES
