"""A batch of searches gives each sequence the bits that it gets alone."""

import functools
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidQueryError, NonFiniteError, SchemaMismatchError
from kvstore.index import Index, RopeSpec, RowView, Workspace, batch_search, make_index
from kvstore.index.batch_search import search_batch
from kvstore.index.pq import PQIndex
from kvstore.index.scanned import ScannedIndex
from kvstore.index.segments import SegmentedIndex
from kvstore.index.threads import kernel_threads
from tests.allocations import peak_bytes
from tests.index.oracles import normal

HEADS, GROUP, DIM = 2, 3, 16
ROPE = RopeSpec.from_theta(1e4, DIM)
OTHER_ROPE = RopeSpec(RopeSpec.from_theta(1e4, 8).inv_freq, "half", attention_factor=1.25)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "1x8": ("pq", {"rope": ROPE}),
    "1x8 of another rope": ("pq", {"rope": OTHER_ROPE}),
    "4x8": ("pq", {"rope": ROPE, "m": 4, "bits": 8}),
    "4x4": ("pq", {"rope": ROPE, "m": 4, "bits": 4}),
    "2x6": ("pq", {"rope": ROPE, "m": 2, "bits": 6}),
    "few pairs": ("pq", {"rope": ROPE, "scan_pairs": 3}),
    "raw": ("pq", {}),
    "raw, bytes": ("pq", {"m": 4, "bits": 8}),
    "raw, four in a byte": ("pq", {"m": 4, "bits": 2}),
    "raw, contiguous": ("pq", {"m": 2, "bits": 6, "pairs": False}),
    "weighted": ("pq", {"rope": ROPE, "weighting": "queries"}),
    "flat": ("flat", {}),
    "sq8": ("sq8", {}),
}
LENGTHS = (1, 3, 64, 65, 700)


def moments() -> Any:
    spread = normal(HEADS, DIM, DIM, seed=9).astype(np.float64)
    return spread @ np.swapaxes(spread, 1, 2) + np.eye(DIM)


def positions_of(n: int, gaps: bool) -> Any:
    """Rising by one, or by a leap here and there."""
    steps = np.ones(n, np.int64)
    if gaps:
        steps[::37] = 5000
    return np.cumsum(steps) + 11


@functools.cache
def made(kind: str, n: int, first_row: int, gaps: bool) -> tuple[Index, RowView | None]:
    """An index of n rows from first_row on, not to be changed, and a view of the table for kinds that read it."""
    name, chosen = KINDS[kind]
    keys, positions = normal(HEADS, n, DIM, seed=len(kind)), positions_of(n, gaps)
    index: Any = make_index(name, HEADS, DIM, first_row=first_row, workspace=Workspace(), **chosen)
    if kind == "weighted":
        index.train(keys, positions, moments=moments())
    else:
        index.train(keys, positions)
    index.add(keys, positions)
    return index, RowView.of(normal(HEADS, first_row + n, DIM)) if index.needs_rows else None


@st.composite
def sequences(draw: Any) -> tuple[Index, RowView | None, int, tuple[int, int]]:
    """What a search of one sequence is told beside the query."""
    kind = draw(st.sampled_from(["1x8", "1x8", "1x8", *KINDS]))
    index, view = made(kind, draw(st.sampled_from(LENGTHS)), draw(st.sampled_from([0, 5])), draw(st.booleans()))
    if draw(st.booleans()) and index.n_rows > 3:
        index = index.clone()
        index.truncate(index.stop_row - 2)
        if view is None:
            index.add(normal(HEADS, 7, DIM), np.arange(70, 77))
    low = draw(st.integers(index.first_row, index.stop_row))
    return index, view, draw(st.integers(1, 800)), (low, draw(st.integers(low, index.stop_row)))


def assert_as_alone(batch: list[Any], *, group: int = GROUP, reduce: str = "sum_softmax", threads: int = 1) -> None:
    """Each gets what its own search gives, bit for bit."""
    q = normal(len(batch), HEADS, group, DIM, seed=7)
    indexes, views, ks, ranges = zip(*batch, strict=True)
    with kernel_threads(threads):
        found = search_batch(indexes, q, ks, views, ranges, scale=0.25, reduce=reduce, workspace=Workspace())
    for i, (index, view, k, (low, high)) in enumerate(batch):
        alone = index.search(q[i], k, view, scale=0.25, reduce=reduce, start=low, stop=high)
        for name in ("rows", "scores", "log_norm"):
            got, expected = getattr(found[i], name), getattr(alone, name)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert got.tobytes() == expected.tobytes(), (i, name)


def whole(index: Index, k: int = 20, view: RowView | None = None) -> Any:
    return index, view, k, (index.first_row, index.stop_row)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(sequences(), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from(["sum_softmax", "max", "mean"]),
    st.sampled_from([1, 2]),
)
def test_a_batch_gives_each_what_it_gets_alone(batch: list[Any], group: int, reduce: str, threads: int) -> None:
    assert_as_alone(batch, group=group, reduce=reduce, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["1x8", "2x6", "raw", "raw, bytes"])
def test_long_sequences_beside_short_ones(kind: str, threads: int) -> None:
    cases = ((20_000, 4000, True), (64, 9, False), (9000, 1, False))
    batch = [whole(made(kind, n, 5, gaps)[0], k) for n, k, gaps in cases]
    assert_as_alone(batch, threads=threads)


def test_a_batch_is_cut_into_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [whole(made("1x8", n, 0, False)[0]) for n in (700, 64, 65, 700, 64)]
    passes = []
    inner = batch_search._search_together
    monkeypatch.setattr(
        batch_search, "_search_together", lambda part, *more: passes.append(len(part)) or inner(part, *more)
    )
    monkeypatch.setattr(batch_search, "_PASS_SCORES", 800 * HEADS * (GROUP + 1))
    assert_as_alone(batch)
    assert passes == [2, 2, 1]


@pytest.mark.parametrize("kind", ["1x8", "2x6", "raw"])
def test_indexes_of_one_kind_are_not_searched_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_one_kind = [made(kind, n, 0, False)[0] for n in (700, 64)]
    asked: list[Any] = []
    inner = ScannedIndex.search
    monkeypatch.setattr(ScannedIndex, "search", lambda self, *a, **more: asked.append(self) or inner(self, *a, **more))
    q, flat = normal(3, HEADS, GROUP, DIM), made("flat", 64, 0, False)
    views, ranges = [None, flat[1], None], [(0, 700), (0, 64), (0, 64)]
    found = search_batch(
        [of_one_kind[0], flat[0], of_one_kind[1]], q, [9] * 3, views, ranges, scale=0.25, workspace=Workspace()
    )
    assert [answer.rows.shape for answer in found] == [(HEADS, 9)] * 3
    assert asked == [flat[0]]


def test_one_index_may_be_asked_twice() -> None:
    index = made("1x8", 700, 5, False)[0]
    assert_as_alone([whole(index), whole(index, 300), (index, None, 4, (100, 101))])


def test_segments_and_parts_of_them() -> None:
    first = made("1x8", 64, 0, False)[0].clone()
    second = made("1x8", 65, 64, False)[0].clone()
    assert_as_alone([whole(SegmentedIndex([first, second])), whole(first), whole(second)])


def test_shared_codebooks_and_codebooks_of_few_centroids() -> None:
    index = made("1x8", 700, 0, False)[0]
    assert isinstance(index, PQIndex)
    other = PQIndex(HEADS, DIM, rope=ROPE, codebook=index.codebook)
    other.add(normal(HEADS, 90, DIM))
    assert_as_alone([whole(index), whole(other), whole(made("1x8", 3, 0, False)[0])])


def test_an_index_may_change_between_batches() -> None:
    still, index = made("1x8", 64, 0, False)[0], made("1x8", 700, 0, False)[0].clone()
    assert_as_alone([whole(still), whole(index)])
    twin = index.clone()
    twin.add(normal(HEADS, 1, DIM), np.array([3]))
    assert_as_alone([whole(twin), whole(index)])
    index.truncate(100)
    assert_as_alone([whole(twin), whole(index)])
    index.add(normal(HEADS, 40, DIM), np.arange(40) * 2)
    assert_as_alone([whole(twin), whole(index)])
    index.train(normal(HEADS, 300, DIM, seed=1))
    index.add(normal(HEADS, 300, DIM, seed=1))
    assert_as_alone([whole(twin), whole(index)])


def test_a_batch_keeps_no_codes_alive() -> None:
    index = made("1x8", 700, 0, False)[0].clone()
    assert isinstance(index, PQIndex)
    assert_as_alone([whole(index), whole(index)])
    codes = weakref.ref(index._codes.array)
    index.add(normal(HEADS, 2000, DIM))
    assert codes() is None


def test_rows_that_tie_and_scores_that_underflow() -> None:
    keys = np.repeat(normal(HEADS, 3, DIM), 50, 1)
    index = PQIndex(HEADS, DIM, rope=ROPE)
    index.train(keys, np.zeros(150, np.int64))
    index.add(keys, np.zeros(150, np.int64))
    q = normal(2, HEADS, 1, DIM) * np.float32(1000)
    found = search_batch([index] * 2, q, [60] * 2, [None] * 2, [(0, 150)] * 2, scale=1.0, workspace=Workspace())
    for i, answer in enumerate(found):
        alone = index.search(q[i], 60, scale=1.0)
        assert answer.rows.tobytes() == alone.rows.tobytes()
        assert answer.scores.tobytes() == alone.scores.tobytes()


def test_queries_of_any_layout_in_memory() -> None:
    index = made("1x8", 64, 0, False)[0]
    q = np.asfortranarray(normal(2, HEADS, GROUP, DIM))
    found = search_batch([index] * 2, q, [5] * 2, [None] * 2, [(0, 64)] * 2, scale=0.25, workspace=Workspace())
    for i, answer in enumerate(found):
        assert answer.rows.tobytes() == index.search(q[i], 5, scale=0.25).rows.tobytes()


def test_a_batch_of_none_finds_nothing() -> None:
    assert search_batch([], normal(0, HEADS, GROUP, DIM), [], [], [], scale=0.25, workspace=Workspace()) == []


def test_what_a_search_refuses_a_batch_refuses() -> None:
    index = made("1x8", 64, 5, False)[0]

    def ask(q: Any, k: int = 3, rows: tuple[int, int] = (5, 69), scale: float = 0.25, reduce: str = "max") -> Any:
        indexes, views = [index] * 2, [None] * 2
        return search_batch(
            indexes, q, [3, k], views, [(5, 69), rows], scale=scale, reduce=reduce, workspace=Workspace()
        )

    q = normal(2, HEADS, GROUP, DIM)
    ask(q)
    wrong = q.copy()
    wrong[1, 0, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="queries hold NaN"):
        ask(wrong)
    for wrong in (q[..., :8], q[:, :1], q.astype(np.float64)):
        with pytest.raises(SchemaMismatchError):
            ask(wrong)
    with pytest.raises(ValueError, match="at least one query head"):
        ask(q[:, :, :0])
    with pytest.raises(InvalidQueryError, match="k must be positive"):
        ask(q, k=0)
    with pytest.raises(InvalidQueryError, match="leave the rows covered"):
        ask(q, rows=(4, 69))
    with pytest.raises(InvalidQueryError, match="scale"):
        ask(q, scale=0.0)
    with pytest.raises(InvalidQueryError, match="sum_softmax"):
        ask(q, reduce="sum")


@pytest.mark.parametrize("kind", ["1x8", "raw"])
def test_a_steady_batch_allocates_nothing_that_grows(kind: str) -> None:
    indexes, q, workspace = [made(kind, 20_000, 5, True)[0]] * 3, normal(3, HEADS, GROUP, DIM), Workspace()
    ranges = [(5, 20_005)] * 3

    def ask() -> None:
        search_batch(indexes, q, [2000] * 3, [None] * 3, ranges, scale=0.25, workspace=workspace)

    with kernel_threads(1):  # scratch of a task is there once a thread
        assert peak_bytes(ask) < 12_288  # Python's own objects, lines of a query; rows would take far more
