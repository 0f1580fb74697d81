import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import InvalidQueryError, KVStore, Schema, SequenceNotFoundError
from tests import oracles
from tests.builders import SCHEMA, append, contents, cut, fill, filled, flat_config, make_query, make_rows, random

REDUCTIONS = ["sum_softmax", "max", "mean"]
INTS = st.integers(-3, 3)


def whole_numbers(shape, seed):
    """Small integers: their inner products are exact in float32, so that ties are ties for everybody."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def store_of(keys, **changes):
    """A one-layer store with these keys [n_kv_heads, n, 16]."""
    schema = Schema(1, 2 * len(keys), len(keys), 16, block_tokens=16)
    store = KVStore(schema, flat_config(**changes))
    seq = store.create("book")
    append(seq, [(keys, torch.zeros_like(keys))])
    return store


def assert_is(found, rows, scores):
    assert found.positions.dtype == torch.int64
    assert found.scores.dtype == torch.float32
    assert found.positions.tolist() == list(rows)
    np.testing.assert_allclose(found.scores.numpy(), [scores[row] for row in rows], rtol=1e-5, atol=1e-5)


@settings(max_examples=50)
@given(st.integers(1, 120), st.integers(1, 130), st.integers(0, 10**6), st.integers(0, 1))
def test_rows_and_scores_are_those_of_a_sort_with_ties_to_the_lower_row(n, k, seed, head):
    keys, q = whole_numbers((2, n, 16), seed), whole_numbers((16,), seed + 1)
    scores = oracles.wide(keys[head]) @ oracles.wide(q)
    found = store_of(keys).topk(0, head, q, k)
    assert found.exact
    assert len(found) == min(k, n)
    assert_is(found, oracles.best(scores, k), scores)


def test_equal_keys_come_in_the_order_of_their_positions():
    keys = random((1, 1, 16), 0).expand(1, 300, 16)
    found = store_of(keys).topk(0, 0, keys[0, 0], 40)
    assert found.positions.tolist() == list(range(40))
    assert found.scores.unique().numel() == 1


def test_equal_keys_among_others_come_in_the_order_of_their_positions():
    keys = random((1, 500, 16), 0)
    q = random((16,), 1)
    twins = [3, 64, 65, 200, 499]
    keys[0, twins] = q  # far above the rest
    assert store_of(keys).topk(0, 0, q, 5).positions.tolist() == twins
    assert store_of(keys).topk(0, 0, q, 3).positions.tolist() == twins[:3]


@pytest.mark.parametrize("k", [50, 51, 10**6, np.int64(50)])
def test_k_of_all_rows_and_more_returns_every_row_sorted(k):
    keys, q = random((2, 50, 16), 0), random((16,), 1)
    found = store_of(keys).topk(0, 1, q, k)
    assert sorted(found.positions.tolist()) == list(range(50))
    assert (found.scores.diff() <= 0).all()


@settings(max_examples=30)
@given(st.integers(1, 90), st.integers(1, 100), st.integers(0, 10**6), st.sampled_from(REDUCTIONS))
def test_a_group_is_scored_by_its_reduction(n, k, seed, reduce):
    keys, q = random((2, n, 16), seed), random((2, 16), seed + 1)
    found = store_of(keys).topk(0, 1, q, k, reduce=reduce)
    scores = oracles.group_scores(q, keys[1], 0.25, reduce)
    oracles.assert_best_rows(found.positions, scores, k)
    np.testing.assert_allclose(found.scores, scores[found.positions], rtol=1e-4, atol=1e-5)
    assert (found.scores.diff() <= 0).all()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_configured_reduction_is_the_default(reduce):
    keys, q = random((2, 60, 16), 0), random((2, 16), 1)
    store = store_of(keys, reduce=reduce)
    assert torch.equal(store.topk(0, 0, q, 9).positions, store.topk(0, 0, q, 9, reduce=reduce).positions)
    np.testing.assert_allclose(
        store.topk(0, 0, q, 60).scores.sort().values, np.sort(oracles.group_scores(q, keys[0], 0.25, reduce)), rtol=1e-4
    )


def test_the_three_reductions_disagree_where_they_should():
    keys = torch.zeros(1, 3, 16)
    keys[0, 0, 0] = 9.0  # one head wants row 0 very much
    keys[0, 1, :2] = 6.0  # both want row 1
    keys[0, 0, 1] = -9.0
    q = torch.zeros(2, 16)
    q[0, 0] = q[1, 1] = 1.0
    store = store_of(keys)
    assert store.topk(0, 0, q, 1, reduce="max").positions.tolist() == [0]
    assert store.topk(0, 0, q, 1, reduce="mean").positions.tolist() == [1]
    assert store.topk(0, 0, q, 1, reduce="sum_softmax").positions.tolist() == [1]


@pytest.mark.parametrize("group_of_one", [True, False])
def test_rows_of_the_middle_leave_out_sinks_and_window(group_of_one):
    keys, q = random((2, 50, 16), 0), random((16,) if group_of_one else (2, 16), 1)
    store = store_of(keys)
    found = store.topk(0, 0, q, 5, rows="middle")
    scores = oracles.group_scores(q.reshape(-1, 16), keys[0, 2:42], 0.25, "max" if group_of_one else "sum_softmax")
    oracles.assert_best_rows(found.positions - 2, scores, 5)
    assert sorted(store.topk(0, 0, q, 99, rows="middle").positions.tolist()) == list(range(2, 42))


@pytest.mark.parametrize("n", [1, 9, 10])
def test_where_there_is_no_middle_none_of_its_rows_are_found(n):
    found = store_of(random((2, n, 16), 0)).topk(0, 0, torch.ones(16), 3, rows="middle")
    assert (found.positions.shape, found.scores.shape) == ((0,), (0,))
    assert found.exact
    assert len(found) == 0


def test_an_empty_sequence_has_no_best_row():
    store = KVStore(SCHEMA, flat_config())
    store.create("empty")
    assert len(store.topk(0, 0, torch.ones(16), 3)) == 0
    assert store.topk_heads(0, torch.ones(2, 1, 16), 3).positions.shape == (2, 0)


def test_padding_is_never_found():
    store = KVStore(SCHEMA, flat_config())
    seq = store.create("padded", first_row=30)
    rows = fill(seq, 60)
    q = rows[0][0][0, 3]  # the key of a padding row
    assert sorted(store.topk(0, 0, q, 99).positions.tolist()) == list(range(30, 60))
    assert sorted(store.topk(0, 0, q, 99, rows="middle").positions.tolist()) == list(range(32, 52))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("group", [1, 2])
def test_all_heads_at_once_find_what_each_finds_alone(group, reduce):
    store, seq, _ = filled(SCHEMA, flat_config(), 300)
    q = random((2, group, 16), 5)
    together = store.topk_heads(1, q, 20, reduce=reduce)
    assert together.positions.shape == together.scores.shape == (2, 20)
    for head in range(2):
        alone = seq.topk(1, head, q[head] if group > 1 else q[head, 0], 20, reduce=reduce)
        assert torch.equal(alone.positions, together.positions[head])
        assert torch.equal(alone.scores, together.scores[head])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keys_are_scored_as_they_are_stored(dtype):
    schema = Schema(1, 4, 2, 16, dtype=dtype, block_tokens=16)
    store, _, rows = filled(schema, flat_config(), 100)
    q = random((2, 16), 3, schema.torch_dtype)
    scores = oracles.group_scores(q, rows[0][0][1], schema.scale, "max")
    found = store.topk(0, 1, q, 10, reduce="max")
    oracles.assert_best_rows(found.positions, scores, 10)
    np.testing.assert_allclose(found.scores, scores[found.positions], rtol=1e-5, atol=1e-5)


def test_a_query_of_double_precision_is_accepted():
    keys, q = random((1, 50, 16), 0), random((16,), 1)
    store = store_of(keys)
    assert torch.equal(store.topk(0, 0, q.double(), 5).positions, store.topk(0, 0, q, 5).positions)


def test_how_the_rows_came_in_does_not_matter():
    rows = make_rows(SCHEMA, 130, seed=3)
    found = []
    for chunk in (130, 17, 1):
        store = KVStore(SCHEMA, flat_config())
        seq = store.create("book")
        for at in range(0, 130, chunk):
            append(seq, cut(rows, at, at + chunk))
        found.append(store.topk(1, 1, make_query(SCHEMA, 0)[2:], 25))
    for other in found[1:]:
        assert torch.equal(other.positions, found[0].positions)
        assert torch.equal(other.scores, found[0].scores)


def test_one_of_several_sequences_is_asked_by_name_or_by_handle():
    store = KVStore(SCHEMA, flat_config())
    rows = {name: fill(store.create(name), 40 + i, seed=i) for i, name in enumerate(["a", "b", "c"])}
    q = random((16,), 9)
    for name, layers in rows.items():
        scores = oracles.wide(layers[1][0][0]) @ oracles.wide(q)
        expected = oracles.best(scores, 7)
        assert store.topk(1, 0, q, 7, sequence=name).positions.tolist() == expected
        assert store.topk(1, 0, q, 7, sequence=store[name]).positions.tolist() == expected
        assert store[name].topk(1, 0, q, 7).positions.tolist() == expected


def test_with_several_sequences_or_none_the_question_must_say_which():
    store = KVStore(SCHEMA, flat_config())
    with pytest.raises(InvalidQueryError, match=r"say which sequence: the store holds 0 \(none\)"):
        store.topk(0, 0, torch.ones(16), 1)
    for i in range(7):
        fill(store.create(f"s{i}"), 3)
    before = contents(store)
    with pytest.raises(InvalidQueryError, match=r"holds 7 \('s0', .*'s4', \.\.\.\)"):
        store.topk(0, 0, torch.ones(16), 1)
    with pytest.raises(SequenceNotFoundError, match="no sequence is named 's9'"):
        store.topk(0, 0, torch.ones(16), 1, sequence="s9")
    assert contents(store) == before


def test_the_query_is_left_as_it_was():
    store, seq, _ = filled(SCHEMA, flat_config(), 100)
    q = make_query(SCHEMA, 1)
    expected = q.clone()
    store.topk(0, 0, q[0], 5)
    store.topk(0, 0, q[:2], 5)
    seq.attend(0, q)
    assert torch.equal(q, expected)
