import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import InvalidQueryError, Schema
from tests.builders import SCHEMA, filled, flat_config, same_bits

STORE, SEQ, ROWS = filled(SCHEMA, flat_config(), 77)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 76), max_size=40), st.integers(0, 1), st.integers(0, 1))
def test_fetch_gives_the_rows_asked_for_in_that_order_bit_for_bit(rows, layer, head):
    keys, values = SEQ.fetch(layer, head, rows)
    assert same_bits(keys, ROWS[layer][0][head, rows])
    assert same_bits(values, ROWS[layer][1][head, rows])


@pytest.mark.parametrize(
    "rows",
    [
        [5, 5, 0, 76],
        (5, 5, 0, 76),
        np.array([5, 5, 0, 76]),
        np.array([5, 5, 0, 76], np.uint8),
        torch.tensor([5, 5, 0, 76]),
        torch.tensor([5, 5, 0, 76], dtype=torch.int32),
        torch.arange(77)[[5, 5, 0, 76]],
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}",
)
def test_row_ids_may_be_any_integers(rows):
    assert same_bits(SEQ.fetch(1, 1, rows)[0], ROWS[1][0][1, [5, 5, 0, 76]])


@pytest.mark.parametrize("rows", [[], torch.empty(0, dtype=torch.int64)], ids=["list", "tensor"])
def test_no_rows_are_an_empty_answer(rows):
    keys, values = SEQ.fetch(0, 0, rows)
    assert keys.shape == values.shape == (0, 16)


def test_what_topk_finds_can_be_fetched():
    q = ROWS[0][0][1, 40]
    hits = STORE.topk(0, 1, q, 5)
    keys, values = SEQ.fetch(0, 1, hits.positions)
    torch.testing.assert_close(keys @ q, hits.scores)
    assert same_bits(values, ROWS[0][1][1, hits.positions])


def test_what_was_fetched_is_a_copy():
    _, seq, rows = filled(SCHEMA, flat_config(), 20)
    for x in (*seq.fetch(0, 0, range(20)), *seq.read(0)):
        x.zero_()
    assert same_bits(seq.read(0)[0], rows[0][0])
    assert same_bits(seq.read(0)[1], rows[0][1])


@pytest.mark.parametrize(("start", "stop"), [(0, 77), (0, 0), (77, 77), (15, 17), (16, 32), (3, None)])
def test_any_range_of_rows_can_be_read(start, stop):
    keys, values = SEQ.read(1, start, stop)
    assert same_bits(keys, ROWS[1][0][:, start:stop])
    assert same_bits(values, ROWS[1][1][:, start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, 78), (78, None)])
def test_a_range_outside_the_rows_is_refused(start, stop):
    with pytest.raises(InvalidQueryError, match="not within the 77 rows of layer 0"):
        SEQ.read(0, start, stop)


def test_values_may_be_wider_or_narrower_than_keys():
    schema = Schema(1, 2, 1, 16, value_dim=24, block_tokens=16)
    _, seq, rows = filled(schema, flat_config(), 40)
    keys, values = seq.fetch(0, 0, [39, 2])
    assert same_bits(keys, rows[0][0][0, [39, 2]])
    assert same_bits(values, rows[0][1][0, [39, 2]])
