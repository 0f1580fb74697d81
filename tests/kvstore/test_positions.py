import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.positions import Positions


def test_rows_are_numbered_from_the_first_position_on():
    positions = Positions(-3)
    positions.append(2)
    positions.append(4)
    assert positions.read(0, 6).tolist() == [-3, -2, -1, 0, 1, 2]
    assert positions.read(2, 4).tolist() == [-1, 0]


def test_rows_without_positions_follow_the_row_before():
    positions = Positions()
    positions.append(2, np.array([10, 11]))
    positions.append(2)
    positions.append(1, np.array([3]))
    positions.append(2)
    assert positions.read(0, 7).tolist() == [10, 11, 12, 13, 3, 4, 5]


def test_consecutive_positions_cost_one_run_however_they_came():
    positions = Positions()
    for start in range(0, 100, 10):
        positions.append(10, np.arange(start, start + 10))
    assert len(positions._starts) == 1


def test_an_empty_range_is_empty():
    positions = Positions()
    assert positions.read(0, 0).tolist() == []
    positions.append(0)
    positions.append(0, np.empty(0, np.int64))
    assert positions.n_rows == 0
    positions.append(3)
    assert positions.read(2, 2).tolist() == []


def test_a_copy_goes_its_own_way():
    positions = Positions()
    positions.append(3)
    twin = positions.copy()
    twin.append(1, np.array([99]))
    positions.append(2)
    assert positions.read(0, 5).tolist() == [0, 1, 2, 3, 4]
    assert twin.read(0, 4).tolist() == [0, 1, 2, 99]


CHUNK = st.one_of(st.integers(0, 5), st.lists(st.integers(0, 12), max_size=6))
MOVES = st.lists(st.one_of(CHUNK, st.tuples(st.floats(0, 1))), max_size=25)


@given(st.integers(-4, 4), MOVES)
def test_any_mix_of_appends_and_truncates_reads_like_a_list(first, moves):
    positions, model = Positions(first), []
    for move in moves:
        if isinstance(move, tuple):
            keep = round(move[0] * len(model))
            positions.truncate(keep)
            del model[keep:]
        elif isinstance(move, int):
            start = model[-1] + 1 if model else first
            positions.append(move)
            model += range(start, start + move)
        else:
            positions.append(len(move), np.array(move, np.int64))
            model += move
        assert positions.n_rows == len(model)
        assert positions.read(0, len(model)).tolist() == model
        half = len(model) // 2
        assert positions.read(half, len(model)).tolist() == model[half:]
