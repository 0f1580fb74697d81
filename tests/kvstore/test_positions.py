import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import InvalidQueryError, KVStore, Schema, SequenceNotFoundError
from tests.builders import append, flat_config, make_rows

NARROW = Schema(1, 1, 1, 1, block_tokens=16)


def new_sequence(first_row=0):
    return KVStore(NARROW, flat_config()).create("book", first_row=first_row)


def add(seq, n, positions=None):
    append(seq, make_rows(NARROW, n, seed=len(seq)), positions)


def test_rows_count_up_and_the_first_token_after_the_padding_is_0():
    seq = new_sequence(first_row=3)
    add(seq, 2)
    add(seq, 4)
    assert seq.positions().tolist() == [-3, -2, -1, 0, 1, 2]
    assert seq.positions(2, 4).tolist() == [-1, 0]


def test_rows_without_positions_go_on_from_the_row_before():
    seq = new_sequence()
    add(seq, 2, [10, 11])
    add(seq, 2)
    add(seq, 1, [3])
    add(seq, 2)
    assert seq.positions().tolist() == [10, 11, 12, 13, 3, 4, 5]


def test_positions_of_an_open_step_are_not_there_yet():
    seq = new_sequence()
    add(seq, 3)
    with seq.step():
        seq.append(0, *make_rows(NARROW, 2, 0)[0], [50, 60])
        assert seq.positions().tolist() == [0, 1, 2]
    assert seq.positions().tolist() == [0, 1, 2, 50, 60]


def test_positions_of_a_failed_step_are_forgotten():
    seq = new_sequence()
    add(seq, 3)
    with pytest.raises(KeyError), seq.step():
        seq.append(0, *make_rows(NARROW, 2, 0)[0], [50, 60])
        raise KeyError
    add(seq, 2)
    assert seq.positions().tolist() == [0, 1, 2, 3, 4]


def test_a_fork_counts_on_by_itself():
    seq = new_sequence(first_row=1)
    add(seq, 3)
    child = seq.fork("child")
    add(child, 1, [99])
    add(seq, 2)
    assert seq.positions().tolist() == [-1, 0, 1, 2, 3]
    assert child.positions().tolist() == [-1, 0, 1, 99]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 4), (2, 1), (4, None)])
def test_only_rows_that_are_there_have_positions(start, stop):
    seq = new_sequence()
    add(seq, 3)
    with pytest.raises(InvalidQueryError, match="not within the 3 committed rows"):
        seq.positions(start, stop)
    assert seq.positions(3).tolist() == seq.positions(1, 1).tolist() == []


def test_a_dropped_sequence_has_no_positions():
    store = KVStore(NARROW, flat_config())
    seq = store.create("book")
    store.drop("book")
    with pytest.raises(SequenceNotFoundError):
        seq.positions()


CHUNK = st.one_of(st.integers(0, 5), st.lists(st.integers(0, 12), min_size=1, max_size=6))
MOVES = st.lists(st.one_of(CHUNK, st.tuples(st.floats(0, 1))), max_size=25)


@settings(max_examples=60)
@given(st.integers(0, 4), MOVES)
def test_any_mix_of_appends_and_truncates_reads_like_a_list(first_row, moves):
    seq, model = new_sequence(first_row), []
    for move in moves:
        if isinstance(move, tuple):
            keep = round(move[0] * len(model))
            seq.truncate(keep)
            del model[keep:]
        elif isinstance(move, int):
            add(seq, move)
            start = model[-1] + 1 if model else -first_row
            model += range(start, start + move)
        else:
            add(seq, len(move), move)
            model += move
        assert seq.positions().tolist() == model
        half = len(model) // 2
        assert seq.positions(half).tolist() == model[half:]
