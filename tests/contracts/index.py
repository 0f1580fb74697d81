"""What every kind of index must do; a test class of a kind inherits it and says how to make one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidQueryError, NonFiniteError, SchemaMismatchError
from kvstore.index.base import Candidates, Index
from kvstore.index.rows import RowView
from tests.index.oracles import assert_top, group_scores, inner_products, log_sum_exp, normal

HEADS, GROUP, DIM, SCALE = 2, 3, 16, 0.25
REDUCTIONS = ["sum_softmax", "max", "mean"]


class IndexContract:
    """Subclasses define `make`; keys are float32 [HEADS, n, DIM], rows start at `first_row`."""

    def make(self, **settings: Any) -> Index:
        raise NotImplementedError

    def filled(self, n: int, *, first_row: int = 0, seed: int = 0) -> tuple[Index, Any, RowView]:
        """An index of n rows from `first_row` on, their keys, and a view of the table that holds them."""
        table = normal(HEADS, first_row + n, DIM, seed=seed)
        keys = np.ascontiguousarray(table[:, first_row:])
        index = self.make(first_row=first_row)
        index.train(keys if n else normal(HEADS, 8, DIM), np.arange(first_row, first_row + n) if n else None)
        index.add(keys)
        index._check()
        return index, keys, RowView.of(table)

    def test_starts_empty(self) -> None:
        index = self.make(first_row=7)
        assert index.n_rows == 0
        assert index.first_row == index.stop_row == 7
        index._check()

    @pytest.mark.parametrize("n", [1, 5, 63, 300])
    @pytest.mark.parametrize("reduce", REDUCTIONS)
    def test_search_returns_the_best_rows_by_its_own_scores(self, n: int, reduce: str) -> None:
        index, _, view = self.filled(n, first_row=5)
        q = normal(HEADS, GROUP, DIM, seed=1)
        scores = index.scores(q, view).astype(np.float64)
        weights = group_scores(scores, SCALE, reduce)
        for k in {1, max(1, n // 10), n}:
            found = index.search(q, k, view, scale=SCALE, reduce=reduce)
            assert found.rows.shape == found.scores.shape == (HEADS, k)
            assert (found.rows.dtype, found.scores.dtype) == (np.int64, np.float32)
            for h in range(HEADS):
                assert_top(found.rows[h] - 5, weights[h], k, 1e-4)
                np.testing.assert_allclose(found.scores[h], weights[h][found.rows[h] - 5], rtol=2e-5, atol=1e-6)
            np.testing.assert_allclose(found.log_norm, log_sum_exp(SCALE * scores), rtol=1e-5, atol=1e-5)

    def test_an_answer_goes_where_the_caller_wants_it(self) -> None:
        index, _, view = self.filled(100, first_row=3)
        q = normal(HEADS, GROUP, DIM, seed=2)
        room = Candidates.room(HEADS, GROUP, 9)
        for reduce in REDUCTIONS:
            expected = index.search(q, 9, view, scale=SCALE, reduce=reduce)
            assert index.search(q, 9, view, scale=SCALE, reduce=reduce, out=room) is room
            for name in ("rows", "scores", "log_norm"):
                np.testing.assert_array_equal(getattr(room, name), getattr(expected, name))
        nothing = Candidates.room(HEADS, GROUP, 0)
        index.search(q, 9, view, scale=SCALE, start=5, stop=5, out=nothing)
        assert np.isneginf(nothing.log_norm).all()
        for wrong in (
            Candidates.room(HEADS, GROUP, 8),
            Candidates.room(HEADS, GROUP + 1, 9),
            Candidates(room.rows.astype(np.int32), room.scores, room.log_norm),
            Candidates(room.rows, np.asfortranarray(room.scores), room.log_norm),
        ):
            with pytest.raises(SchemaMismatchError, match=r"Candidates\.room"):
                index.search(q, 9, view, scale=SCALE, out=wrong)

    def test_k_above_the_number_of_rows_returns_all(self) -> None:
        index, _, view = self.filled(10, first_row=3)
        found = index.search(normal(HEADS, GROUP, DIM), 99, view, scale=SCALE)
        assert (found.rows == np.arange(3, 13)).all()

    def test_a_range_is_searched_alone(self) -> None:
        index, _, view = self.filled(200, first_row=4)
        q = normal(HEADS, GROUP, DIM)
        everything = index.scores(q, view)
        part = index.scores(q, view, start=70, stop=150)
        np.testing.assert_array_equal(part, everything[:, :, 66:146])
        found = index.search(q, 9, view, scale=SCALE, start=70, stop=150)
        assert found.rows.min() >= 70
        assert found.rows.max() < 150
        np.testing.assert_allclose(found.log_norm, log_sum_exp(SCALE * part.astype(np.float64)), rtol=1e-5, atol=1e-5)

    def test_an_empty_range_finds_nothing(self) -> None:
        index, _, view = self.filled(10)
        q = normal(HEADS, GROUP, DIM)
        found = index.search(q, 5, view, scale=SCALE, start=4, stop=4)
        assert found.rows.shape == (HEADS, 0)
        assert np.isneginf(found.log_norm).all()
        assert index.scores(q, view, start=4, stop=4).shape == (HEADS, GROUP, 0)

    @pytest.mark.parametrize("group", [1, 2, 5])
    def test_any_group(self, group: int) -> None:
        index, _, view = self.filled(100)
        q = normal(HEADS, group, DIM, seed=3)
        scores = index.scores(q, view).astype(np.float64)
        alone = [index.scores(np.ascontiguousarray(q[:, g : g + 1]), view) for g in range(group)]
        one_by_one = np.concatenate(alone, 1)
        np.testing.assert_allclose(scores, one_by_one, rtol=1e-5, atol=1e-5)
        found = index.search(q, 7, view, scale=SCALE)
        for h in range(HEADS):
            assert_top(found.rows[h], group_scores(scores, SCALE, "sum_softmax")[h], 7, 1e-4)

    def test_equal_keys_give_the_lowest_rows(self) -> None:
        keys = np.repeat(normal(HEADS, 1, DIM), 50, 1)
        index = self.make()
        index.train(keys, np.zeros(50, np.int64))
        index.add(keys, np.zeros(50, np.int64))
        found = index.search(normal(HEADS, GROUP, DIM), 6, RowView.of(keys), scale=SCALE)
        assert (found.rows == np.arange(6)).all()

    def test_scores_that_underflow_are_still_ordered_for_one_query(self) -> None:
        index, _, view = self.filled(300)
        q = normal(HEADS, 1, DIM) * 1000
        found = index.search(q, 250, view, scale=1.0)
        scores = index.scores(q, view).astype(np.float64)
        for h in range(HEADS):
            assert_top(found.rows[h], scores[h, 0], 250, 1e-6)

    def test_truncate_then_add_equals_adding_at_once(self) -> None:
        index, keys, view = self.filled(120, first_row=2)
        q = normal(HEADS, GROUP, DIM)
        before = index.scores(q, view)
        index.truncate(2 + 50)
        assert (index.n_rows, index.stop_row) == (50, 52)
        index._check()
        index.add(np.ascontiguousarray(keys[:, 50:51]))
        index.add(np.ascontiguousarray(keys[:, 51:]))
        index._check()
        np.testing.assert_array_equal(index.scores(q, view), before)

    def test_clone_is_independent(self) -> None:
        index, keys, view = self.filled(60)
        q = normal(HEADS, GROUP, DIM)
        before = index.scores(q, view)
        twin = index.clone()
        twin.truncate(10)
        twin.add(np.ascontiguousarray(keys[:, :5]))
        assert (index.n_rows, twin.n_rows) == (60, 15)
        np.testing.assert_array_equal(index.scores(q, view), before)
        other = index.clone()
        index.truncate(0)
        index.add(-keys)
        np.testing.assert_array_equal(other.scores(q, view), before)

    def test_training_drops_rows(self) -> None:
        index, keys, _ = self.filled(20)
        index.train(keys)
        assert index.n_rows == 0
        index._check()

    def test_adding_nothing_does_nothing(self) -> None:
        index, _, _ = self.filled(20)
        index.add(np.empty((HEADS, 0, DIM), np.float32))
        assert index.n_rows == 20

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_numbers_that_are_none_are_refused(self, bad: float) -> None:
        index, keys, view = self.filled(20)
        wrong = keys.copy()
        wrong[1, 7, 3] = bad
        for call in (lambda: index.train(wrong), lambda: index.add(wrong)):
            with pytest.raises(NonFiniteError, match="NaN or infinity"):
                call()
        with pytest.raises(NonFiniteError):
            index.search(np.ascontiguousarray(wrong[:, 6:8]), 3, view, scale=SCALE)
        assert index.n_rows == 20
        index._check()

    def test_wrong_shapes_are_refused_and_change_nothing(self) -> None:
        index, keys, view = self.filled(20)
        wrong: Any
        for wrong in (keys[:1], keys[:, :, :8], keys[0], keys.astype(np.float64), [[1.0]]):
            with pytest.raises(SchemaMismatchError):
                index.train(wrong)
            with pytest.raises(SchemaMismatchError):
                index.add(wrong)
            with pytest.raises(SchemaMismatchError):
                index.search(wrong, 1, view, scale=SCALE)
        for positions in (np.arange(3), np.arange(20.0)):
            with pytest.raises(SchemaMismatchError):
                index.add(keys, positions)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least one"):
            index.train(np.empty((HEADS, 0, DIM), np.float32))
        assert index.n_rows == 20
        index._check()

    def test_queries_out_of_range_are_refused(self) -> None:
        index, _, view = self.filled(20, first_row=4)
        q = normal(HEADS, GROUP, DIM)
        for k in (0, -1):
            with pytest.raises(InvalidQueryError, match="k must be positive"):
                index.search(q, k, view, scale=SCALE)
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidQueryError, match="scale"):
                index.search(q, 1, view, scale=wrong)
        with pytest.raises(InvalidQueryError, match="sum_softmax"):
            index.search(q, 1, view, scale=SCALE, reduce="sum")
        for start, stop in [(3, None), (None, 25), (9, 8)]:
            with pytest.raises(InvalidQueryError, match="leave the rows covered"):
                index.search(q, 1, view, scale=SCALE, start=start, stop=stop)
        for stop_row in (3, 25):
            with pytest.raises(InvalidQueryError, match="truncate"):
                index.truncate(stop_row)

    def test_strided_input_is_read_right(self) -> None:
        index, keys, view = self.filled(40)
        q = normal(HEADS, GROUP, DIM)
        before = index.scores(q, view)
        spread = np.zeros((HEADS, 40, 2 * DIM), np.float32)
        spread[:, :, ::2] = keys
        other = index.clone()
        other.truncate(0)
        other.add(spread[:, :, ::2])
        np.testing.assert_array_equal(other.scores(np.swapaxes(np.swapaxes(q, 1, 2).copy(), 1, 2), view), before)

    def test_one_huge_key_does_not_spoil_the_rest(self) -> None:
        keys = normal(HEADS, 200, DIM)
        keys[:, 13] *= 1e4
        index = self.make()
        index.train(keys)
        index.add(keys)
        scores = index.scores(normal(HEADS, GROUP, DIM), RowView.of(keys))
        assert np.isfinite(scores).all()
        exact = inner_products(normal(HEADS, GROUP, DIM), keys)
        np.testing.assert_allclose(scores[:, :, 13], exact[:, :, 13], rtol=1e-3)
        others = np.delete(np.arange(200), 13)
        assert np.abs(scores[:, :, others] - exact[:, :, others]).mean() < np.abs(exact[:, :, others]).mean()

    def test_describe_names_the_kind(self) -> None:
        index, _, _ = self.filled(5)
        assert index.describe()["kind"] == index.kind
        assert index.describe()["rows"] == 5
        assert index.nbytes >= index.code_bytes_per_key * HEADS * 5
