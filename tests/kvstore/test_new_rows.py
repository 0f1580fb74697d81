"""Rows on their way into tables: a batch at once, few by address, many by torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import HeapFullError, InvalidQueryError, KVStore, NonFiniteError, SchemaMismatchError, StepError
from kvstore.new_rows import FEW_ROWS
from tests.builders import SCHEMA, flat_config, make_query, make_rows, random, same_bits


def batch_rows(n_sequences, n, seed, layout="dense"):
    """Keys and values of a batch, as a model leaves them: dense, or heads and tokens the other way round."""
    shapes = [(n_sequences, SCHEMA.n_kv_heads, n, dim) for dim in (SCHEMA.head_dim, SCHEMA.value_dim)]
    if layout == "dense":
        return [random(shape, seed + i) for i, shape in enumerate(shapes)]
    if layout == "tokens first":
        return [random((b, n, h, d), seed + i).transpose(1, 2) for i, (b, h, n, d) in enumerate(shapes)]
    return [random((b, h, d, n), seed + i).transpose(2, 3) for i, (b, h, n, d) in enumerate(shapes)]


def assert_rows(seq, layer, keys, values):
    found = seq.read(layer, 0, len(seq))
    assert same_bits(found[0], keys)
    assert same_bits(found[1], values)


@settings(max_examples=40)
@given(
    st.integers(1, 4), st.lists(st.sampled_from([1, 2, 15, 16, 17, FEW_ROWS, FEW_ROWS + 1]), min_size=1, max_size=4),
    st.sampled_from(["dense", "tokens first", "dims first"]), st.booleans(),
)  # fmt: skip
def test_a_batch_is_appended_as_its_sequences_are(n_sequences, steps, layout, gradients):
    store = KVStore(SCHEMA)
    batch, singles = ([store.create(f"{kind} {i}") for i in range(n_sequences)] for kind in ("batch", "single"))
    whole = [[] for _ in range(SCHEMA.n_layers)]
    for seq in batch + singles:
        assert len(seq) == 0
    for step, n in enumerate(steps):
        for seq in batch + singles:
            seq.begin_step()
        for layer in range(SCHEMA.n_layers):
            keys, values = batch_rows(n_sequences, n, 100 * step + 10 * layer, layout)
            keys.requires_grad_(gradients)
            store.append(layer, batch, keys, values)
            for i, seq in enumerate(singles):
                seq.append(layer, keys[i], values[i])
            whole[layer].append((keys.detach(), values))
        for seq in batch + singles:
            seq.commit_step()
            store._check()
    for layer, parts in enumerate(whole):
        keys, values = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        for i, seq in enumerate(batch):
            assert_rows(seq, layer, keys[i], values[i])
            assert_rows(singles[i], layer, keys[i], values[i])
            assert len(seq) == sum(steps)


def test_positions_of_a_batch_are_each_sequences_own():
    store = KVStore(SCHEMA)
    batch = [store.create("a"), store.create("b")]
    for seq in batch:
        seq.begin_step()
    for layer in range(SCHEMA.n_layers):
        positions = [torch.arange(3), torch.arange(10, 13)] if layer == 0 else None
        store.append(layer, batch, *batch_rows(2, 3, layer), positions)
    for seq in batch:
        seq.commit_step()
    assert [seq._positions.at([0, 1, 2]).tolist() for seq in batch] == [[0, 1, 2], [10, 11, 12]]


@pytest.mark.parametrize("n", [1, FEW_ROWS + 1])
def test_a_batch_with_a_key_that_is_not_finite_leaves_every_sequence_as_it_was(n):
    store = KVStore(SCHEMA)
    batch = [store.create("a"), store.create("b")]
    for seq in batch:
        seq.begin_step()
    keys, values = batch_rows(2, n, 1)
    keys[1, 0, n - 1, 3] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"nan at \[sequence, head, row, dim\] = \[1, 0, {n - 1}, 3\]"):
        store.append(0, batch, keys, values)
    keys[1, 0, n - 1, 3] = 0
    for layer in range(SCHEMA.n_layers):
        store.append(layer, batch, keys, values)
    for seq in batch:
        seq.commit_step()
        assert len(seq) == n
    store._check()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda keys, values: (keys[:1], values), SchemaMismatchError, r"keys have shape \[1, 2, 3, 16\]"),
        (lambda keys, values: (keys, values[0]), SchemaMismatchError, r"n_sequences=2, n_kv_heads=2, n_tokens, 16"),
        (lambda keys, values: (keys, values[:, :, :2]), SchemaMismatchError, "3 keys came with 2 values"),
        (lambda keys, values: (keys.double(), values), SchemaMismatchError, r"keys are torch.float64"),
    ],
)
def test_a_wrong_batch_is_refused_before_anything_changes(change, error, says):
    store = KVStore(SCHEMA)
    batch = [store.create("a"), store.create("b")]
    for seq in batch:
        seq.begin_step()
    keys, values = batch_rows(2, 3, 1)
    with pytest.raises(error, match=says):
        store.append(0, batch, *change(keys, values))
    assert [seq._tables[0].n_rows for seq in batch] == [0, 0]
    store.append(0, batch, keys, values)
    assert [seq._tables[0].n_rows for seq in batch] == [3, 3]


def test_a_sequence_without_a_step_or_of_another_store_is_refused():
    store, other = KVStore(SCHEMA), KVStore(SCHEMA)
    open_, closed, foreign = store.create("open"), store.create("closed"), other.create("foreign")
    open_.begin_step()
    foreign.begin_step()
    rows = batch_rows(2, 1, 1)
    with pytest.raises(StepError, match="append needs an open step"):
        store.append(0, [open_, closed], *rows)
    with pytest.raises(InvalidQueryError, match="not a sequence of this store"):
        store.append(0, [open_, foreign], *rows)
    assert open_._tables[0].n_rows == 0


def test_when_the_heap_fills_within_a_batch_aborting_the_steps_leaves_nothing():
    block_bytes = KVStore(SCHEMA).heap.block_bytes
    store = KVStore(SCHEMA, flat_config(heap_bytes=3 * block_bytes))
    batch = [store.create("a"), store.create("b")]
    for seq in batch:
        seq.begin_step()
    store.append(0, batch, *batch_rows(2, 16, 1))
    with pytest.raises(HeapFullError):
        store.append(1, batch, *batch_rows(2, 16, 2))
    for seq in batch:
        seq.abort_step()
        assert len(seq) == 0
    store._check()
    assert store.heap.used_bytes == 0


def test_few_rows_leave_a_block_that_a_fork_shares():
    store = KVStore(SCHEMA)
    seq = store.create("a")
    rows = make_rows(SCHEMA, 20, seed=1)
    with seq.step():
        for layer, (keys, values) in enumerate(rows):
            seq.append(layer, keys, values)
    fork = seq.fork("b")
    more = make_rows(SCHEMA, 1, seed=2)
    with fork.step():
        for layer, (keys, values) in enumerate(more):
            fork.append(layer, keys, values)
    for layer, (keys, values) in enumerate(rows):
        assert_rows(seq, layer, keys, values)
        assert_rows(fork, layer, *(torch.cat(pair, dim=1) for pair in zip((keys, values), more[layer], strict=True)))
    store._check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_query_is_read_in_any_dtype_and_layout(dtype):
    store = KVStore(SCHEMA)
    seq = store.create("a")
    with seq.step():
        for layer, (keys, values) in enumerate(make_rows(SCHEMA, 40, seed=1)):
            seq.append(layer, keys, values)
    q = make_query(SCHEMA, 3).to(dtype)
    expected = store.attend(0, [seq], q[None].float()).to(dtype)
    wide = torch.zeros(1, SCHEMA.n_q_heads, 2 * SCHEMA.head_dim, dtype=dtype)
    wide[:, :, ::2] = q
    turned = q.T.contiguous().T[None]
    for layout in (q[None], wide[:, :, ::2], turned, q[None].clone().requires_grad_()):
        assert torch.equal(store.attend(0, [seq], layout), expected)
    for bad in (float("nan"), float("inf")):
        wrong = q[None].clone()
        wrong[0, 1, 5] = bad
        with pytest.raises(NonFiniteError, match="the query holds NaN or infinity"):
            store.attend(0, [seq], wrong)
