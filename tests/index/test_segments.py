"""Several indexes seen as one."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.base import Index
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.segments import SegmentedIndex
from tests.contracts.index import DIM, GROUP, HEADS, SCALE, IndexContract
from tests.index.oracles import normal

ROPE = RopeSpec.from_theta(1e4, DIM)


def pq(**settings: Any) -> PQIndex:
    return PQIndex(HEADS, DIM, m=1, bits=5, rope=ROPE, **settings)


class TestOneSegment(IndexContract):
    def make(self, **settings: Any) -> Index:
        return SegmentedIndex([pq(**settings)])

    def test_describe_names_the_kind(self) -> None:
        index, _, _ = self.filled(5)
        assert index.describe() | {"kind": "pq", "rows": 5, "segments": 1} == index.describe()


def segments_of(keys, cuts, first_row=3):
    """Indexes over the rows between cuts, each trained on its own."""
    found = []
    for start, stop in pairwise(cuts):
        part, where = np.ascontiguousarray(keys[:, start:stop]), np.arange(first_row + start, first_row + stop)
        found.append(pq(first_row=first_row + start))
        found[-1].train(part, where)
        found[-1].add(part, where)
    return found


@pytest.mark.parametrize("cuts", [(0, 100), (0, 40, 100), (0, 17, 18, 64, 100)])
def test_scores_are_those_of_the_segments_and_ranked_together(cuts):
    keys, q = normal(HEADS, 100, DIM, seed=1), normal(HEADS, GROUP, DIM, seed=2)
    parts = segments_of(keys, cuts)
    index = SegmentedIndex([part.clone() for part in parts])
    index._check()
    scores = np.concatenate([part.scores(q) for part in parts], axis=2)
    np.testing.assert_array_equal(index.scores(q), scores)
    np.testing.assert_array_equal(index.scores(q, start=20, stop=90), scores[:, :, 17:87])
    found = index.search(q, 12, scale=SCALE, reduce="max")
    best = np.sort(np.argsort(-scores.max(axis=1), axis=1, kind="stable")[:, :12], axis=1) + 3
    np.testing.assert_array_equal(found.rows, best)
    assert (index.n_rows, index.first_row, index.stop_row) == (100, 3, 103)


def test_segments_with_one_codebook_are_one_index():
    keys, q = normal(HEADS, 90, DIM, seed=1), normal(HEADS, GROUP, DIM, seed=2)
    whole = pq()
    whole.train(keys)
    whole.add(keys)
    parts = []
    for start, stop in ((0, 30), (30, 90)):
        parts.append(pq(first_row=start, codebook=whole.codebook))
        parts[-1].add(np.ascontiguousarray(keys[:, start:stop]), np.arange(start, stop))
    mine, other = SegmentedIndex(parts).search(q, 9, scale=SCALE), whole.search(q, 9, scale=SCALE)
    for name in ("rows", "scores", "log_norm"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))


@given(st.integers(3, 103), st.integers(0, 20))
def test_what_is_cut_and_added_is_in_the_last_segment_left(stop_row, n_added):
    keys = normal(HEADS, 140, DIM, seed=1)
    index = SegmentedIndex(segments_of(keys, (0, 40, 41, 100)))
    twin = index.clone()
    index.truncate(stop_row)
    index._check()
    assert index.n_rows == stop_row - 3
    index.add(np.ascontiguousarray(keys[:, 100 : 100 + n_added]))
    index._check()
    assert index.stop_row == stop_row + n_added
    q = normal(HEADS, GROUP, DIM, seed=2)
    kept = index.scores(q, start=3, stop=stop_row)
    np.testing.assert_array_equal(kept, twin.scores(q, start=3, stop=stop_row))
    assert twin.n_rows == 100


def test_bytes_are_those_of_all_segments():
    parts = segments_of(normal(HEADS, 100, DIM, seed=1), (0, 40, 100))
    index = SegmentedIndex(parts)
    assert index.nbytes == parts[0].nbytes + parts[1].nbytes
    assert index.code_bytes_per_key == 1.0
    assert index.codebook is parts[1].codebook
