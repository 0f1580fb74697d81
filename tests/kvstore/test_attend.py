import numpy as np
import pytest
import torch

from kvstore import KVStore, Schema, StoreConfig
from kvstore.index.threads import kernel_threads
from tests import oracles
from tests.builders import (
    SCHEMA,
    append,
    cut,
    fill,
    filled,
    flat_config,
    make_query,
    make_rows,
    pq_config,
    random,
    same_bits,
)

ONE_LAYER = Schema(1, 4, 2, 16, block_tokens=16)
ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
REDUCTIONS = ["sum_softmax", "max", "mean"]


def assert_attends(out, q, keys, values, scale, rows=None):
    assert out.dtype == q.dtype
    expected = oracles.attention(q, keys, values, scale, rows)
    np.testing.assert_allclose(oracles.wide(out), expected, rtol=ROUNDING[q.dtype], atol=ROUNDING[q.dtype])


def middle_of(config, n):
    return config.sinks, n - config.window


# ---- dense ----


@pytest.mark.parametrize("one_by_one", [False, True])
def test_up_to_200_rows_the_default_config_is_dense_attention(one_by_one):
    rows = make_rows(ONE_LAYER, 200, seed=1)
    keys, values = rows[0]
    grown = KVStore(ONE_LAYER).create("grown")
    for n in range(1, 201):
        if one_by_one:
            append(grown, cut(rows, n - 1, n))
            seq = grown
        else:
            seq = KVStore(ONE_LAYER).create("prompt")
            append(seq, cut(rows, 0, n))
        q = make_query(ONE_LAYER, n)
        assert_attends(seq.attend(0, q), q, keys[:, :n], values[:, :n], ONE_LAYER.scale)


@pytest.mark.parametrize("config", [flat_config(dense_rows=0), pq_config(dense_rows=0)], ids=["flat", "pq"])
@pytest.mark.parametrize("budget", [None, 1.0, 700, 10**9])
def test_a_budget_that_covers_all_rows_gives_dense_attention(config, budget):
    _, seq, rows = filled(SCHEMA, config, 700)
    q = make_query(SCHEMA, 2)
    for layer, (keys, values) in enumerate(rows):
        out = seq.attend(layer, q, budget=budget)
        assert_attends(out, q, keys, values, SCHEMA.scale)
        assert same_bits(out, seq.attend(layer, q, budget=None))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("budget", [None, 40])
def test_every_group_size_attends_with_its_own_kv_head(group, budget):
    schema, config = Schema(1, 2 * group, 2, 16, block_tokens=16), flat_config()
    _, seq, [(keys, values)] = filled(schema, config, 150)
    q = make_query(schema, group)
    read = oracles.selective_rows(q, keys, schema.scale, *middle_of(config, 150), 30, "sum_softmax")
    assert_attends(seq.attend(0, q, budget=budget), q, keys, values, schema.scale, read if budget else None)


@pytest.mark.parametrize("block_tokens", [1, 16, 64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 130])
def test_block_size_does_not_show(block_tokens, n):
    schema = Schema(1, 4, 2, 16, block_tokens=block_tokens)
    _, seq, [(keys, values)] = filled(schema, flat_config(), n)
    q = make_query(schema, n)
    assert_attends(seq.attend(0, q, budget=None), q, keys, values, schema.scale)
    _, other, _ = filled(ONE_LAYER, flat_config(), n)
    for budget in (None, 40):
        torch.testing.assert_close(seq.attend(0, q, budget=budget), other.attend(0, q, budget=budget))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 24), (24, 16), (32, 32), (64, 64)])
@pytest.mark.parametrize("budget", [None, 40])
def test_keys_and_values_may_have_any_width(key_dim, value_dim, budget):
    schema, config = Schema(1, 4, 2, key_dim, value_dim=value_dim, block_tokens=16), flat_config()
    _, seq, [(keys, values)] = filled(schema, config, 130)
    q = make_query(schema, 3)
    read = oracles.selective_rows(q, keys, schema.scale, *middle_of(config, 130), 30, "sum_softmax")
    out = seq.attend(0, q, budget=budget)
    assert out.shape == (4, value_dim)
    assert_attends(out, q, keys, values, schema.scale, read if budget else None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("budget", [None, 40])
def test_rows_of_every_dtype_are_attended_to_as_they_are_stored(dtype, budget):
    schema, config = Schema(1, 4, 2, 16, dtype=dtype, block_tokens=16), flat_config()
    _, seq, [(keys, values)] = filled(schema, config, 130)
    for q in (make_query(schema, 3), make_query(schema, 3).to(schema.torch_dtype)):
        read = oracles.selective_rows(q, keys, schema.scale, *middle_of(config, 130), 30, "sum_softmax")
        assert_attends(seq.attend(0, q, budget=budget), q, keys, values, schema.scale, read if budget else None)


@pytest.mark.parametrize("n", [2047, 2048, 2049, 4097, 5000])
def test_long_rows_are_cut_into_pieces_that_merge_to_the_same(n):
    keys, values = make_rows(ONE_LAYER, n, seed=4)[0]
    keys = keys * torch.linspace(0.1, 4, n)[:, None]  # the largest scores lie in the last piece
    seq = KVStore(ONE_LAYER).create("long")
    append(seq, [(keys, values)])
    q = make_query(ONE_LAYER, 5)
    assert_attends(seq.attend(0, q, budget=None), q, keys, values, ONE_LAYER.scale)


@pytest.mark.parametrize(("sinks", "window"), [(2100, 8), (2, 2100), (2100, 2100)])
def test_sinks_and_windows_longer_than_a_piece_merge_with_what_was_picked(sinks, window):
    config = flat_config(sinks=sinks, window=window, budget=1)
    _, seq, [(keys, values)] = filled(ONE_LAYER, config, 4600)
    q = make_query(ONE_LAYER, 6)
    read = oracles.selective_rows(q, keys, 0.25, sinks, 4600 - window, 8, "sum_softmax")
    assert_attends(seq.attend(0, q), q, keys, values, 0.25, read)


@pytest.mark.parametrize("size", [1e-20, 30.0, 3e4])
def test_flat_and_peaked_softmaxes_do_not_overflow(size):
    _, seq, [(keys, values)] = filled(ONE_LAYER, flat_config(), 300)
    q = make_query(ONE_LAYER, 7, size)
    assert_attends(seq.attend(0, q, budget=None), q, keys, values, 0.25)
    assert torch.isfinite(seq.attend(0, q)).all()


def test_scale_and_budget_of_a_call_override_those_of_the_schema_and_the_sequence():
    config = flat_config(budget=24)
    _, seq, [(keys, values)] = filled(ONE_LAYER, config, 300)
    q = make_query(ONE_LAYER, 8)
    assert_attends(seq.attend(0, q, budget=None, scale=0.9), q, keys, values, 0.9)
    read = oracles.selective_rows(q, keys, 0.9, *middle_of(config, 300), 50, "sum_softmax")
    assert_attends(seq.attend(0, q, budget=60, scale=0.9), q, keys, values, 0.9, read)
    seq.budget = 60
    assert same_bits(seq.attend(0, q), seq.attend(0, q, budget=60))
    assert config.budget == 24


def test_the_scale_of_the_schema_is_used():
    schema = Schema(1, 4, 2, 16, block_tokens=16, scale=1.5)
    _, seq, [(keys, values)] = filled(schema, flat_config(), 20)
    q = make_query(schema, 9, 0.5)
    assert_attends(seq.attend(0, q), q, keys, values, 1.5)


# ---- selective ----


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n", [41, 100, 777, 3000])
@pytest.mark.parametrize("budget", [1, 24, 40, 0.1])
def test_a_flat_plan_reads_sinks_window_and_the_exact_best_of_the_middle(n, budget, reduce):
    config = flat_config(reduce=reduce)
    _, seq, [(keys, values)] = filled(ONE_LAYER, config, n)
    q = make_query(ONE_LAYER, n)
    allowed = budget if isinstance(budget, int) else round(budget * n)
    picked = max(allowed - 10, 8)
    read = oracles.selective_rows(q, keys, 0.25, *middle_of(config, n), picked, reduce)
    assert_attends(seq.attend(0, q, budget=budget), q, keys, values, 0.25, read if picked < n - 10 else None)


def test_equal_scores_are_picked_by_the_lower_row():
    keys, values = make_rows(ONE_LAYER, 200, seed=5)[0]
    keys = keys[:, :1].expand(2, 200, 16)
    seq = KVStore(ONE_LAYER, flat_config()).create("equal")
    append(seq, [(keys, values)])
    q = make_query(ONE_LAYER, 10)
    read = [[*range(2), *range(2, 16), *range(192, 200)]] * 2
    assert_attends(seq.attend(0, q, budget=24), q, keys, values, 0.25, read)


def test_values_of_rows_that_were_not_picked_are_not_touched():
    config = flat_config()
    keys, values = make_rows(ONE_LAYER, 200, seed=6)[0]
    q = make_query(ONE_LAYER, 11)
    read = oracles.selective_rows(q, keys, 0.25, *middle_of(config, 200), 14, "sum_softmax")
    poisoned = torch.full_like(values, torch.nan)
    for head in range(2):
        poisoned[head, read[head]] = values[head, read[head]]
    seq = KVStore(ONE_LAYER, config).create("poisoned")
    append(seq, [(keys, poisoned)])
    assert_attends(seq.attend(0, q), q, keys, values, 0.25, read)


@pytest.mark.parametrize("first_row", [1, 16, 30])
@pytest.mark.parametrize("n", [31, 35, 60, 400])
@pytest.mark.parametrize("make_config", [flat_config, pq_config])
def test_padding_rows_are_as_if_they_were_not_there(first_row, n, make_config):
    padded = KVStore(ONE_LAYER, make_config()).create("padded", first_row=first_row)
    plain = KVStore(ONE_LAYER, make_config()).create("plain")
    rows = make_rows(ONE_LAYER, n, seed=7)
    keys, values = (x.clone() for x in rows[0])
    keys[:, :first_row] *= 1e4
    values[:, :first_row] = torch.nan
    append(padded, [(keys, values)])
    append(plain, cut(rows, first_row, n))
    for seed in range(5):
        q = make_query(ONE_LAYER, seed)
        for budget in (None, 24):
            torch.testing.assert_close(padded.attend(0, q, budget=budget), plain.attend(0, q, budget=budget))


# ---- inside a step ----


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("n", [1, 30])
def test_inside_a_step_a_layer_sees_the_rows_it_has_just_appended(budget, n):
    config = flat_config()
    _, seq, old = filled(SCHEMA, config, 100)
    new, q = make_rows(SCHEMA, n, seed=1), make_query(SCHEMA, 12)
    with seq.step():
        for layer in range(2):
            seq.append(layer, *new[layer])
            keys, values = (torch.cat([a, b], 1) for a, b in zip(old[layer], new[layer], strict=True))
            read = oracles.selective_rows(q, keys, 0.25, *middle_of(config, 100 + n), 14, "sum_softmax")
            assert_attends(seq.attend(layer, q, budget=budget), q, keys, values, 0.25, read if budget else None)


def test_the_first_step_attends_to_its_own_rows():
    seq = KVStore(SCHEMA, flat_config()).create("book")
    rows, q = make_rows(SCHEMA, 5, seed=1), make_query(SCHEMA, 13)
    with seq.step():
        for layer in range(2):
            seq.append(layer, *rows[layer])
            assert_attends(seq.attend(layer, q), q, *rows[layer], 0.25)


def test_rows_of_a_rolled_back_step_are_not_attended_to():
    _, seq, _old = filled(SCHEMA, flat_config(), 100)
    q = make_query(SCHEMA, 14)
    before = seq.attend(0, q), seq.attend(0, q, budget=None)
    with pytest.raises(RuntimeError), seq.step():
        seq.append(0, *make_rows(SCHEMA, 50, seed=1)[0])
        assert not same_bits(seq.attend(0, q, budget=None), before[1])
        raise RuntimeError
    assert same_bits(seq.attend(0, q), before[0])
    assert same_bits(seq.attend(0, q, budget=None), before[1])


# ---- several at once ----


def batch_of(config, lengths=(5, 700, 40, 3000, 90)):
    store = KVStore(ONE_LAYER, config)
    sequences = [store.create(f"s{n}", first_row=3 * (i % 2)) for i, n in enumerate(lengths)]
    for i, (seq, n) in enumerate(zip(sequences, lengths, strict=True)):
        fill(seq, n, seed=i)
    return store, sequences, torch.stack([make_query(ONE_LAYER, i) for i in range(len(lengths))])


@pytest.mark.parametrize("budget", [None, 24, "sequence"])
@pytest.mark.parametrize("config", [flat_config(), pq_config(), StoreConfig()], ids=["flat", "pq", "default"])
def test_a_batch_gives_each_sequence_what_it_gets_alone_bit_for_bit(config, budget):
    store, sequences, q = batch_of(config)
    together = store.attend(0, sequences, q, budget=budget)
    assert together.shape == (5, 4, 16)
    for i, seq in enumerate(sequences):
        assert same_bits(together[i], seq.attend(0, q[i], budget=budget))
    backwards = store.attend(0, sequences[::-1], q.flip(0), budget=budget)
    assert same_bits(backwards.flip(0), together)


def test_a_sequence_may_be_asked_twice_in_a_batch():
    store, sequences, q = batch_of(flat_config())
    both = store.attend(0, [sequences[1], sequences[1]], q[:2])
    assert same_bits(both[0], sequences[1].attend(0, q[0]))
    assert same_bits(both[1], sequences[1].attend(0, q[1]))


def test_a_batch_of_none_is_empty():
    assert KVStore(ONE_LAYER).attend(0, [], torch.empty(0, 4, 16)).shape == (0, 4, 16)


@pytest.mark.parametrize("config", [flat_config(), pq_config()], ids=["flat", "pq"])
def test_any_number_of_threads_gives_the_same_bits(config):
    answers = []
    for threads in (1, 2):
        with kernel_threads(threads):
            store, sequences, q = batch_of(config)
            outs = [store.attend(0, sequences, q, budget=budget) for budget in (None, 24, 0.3)]
            hits = [store.topk(0, 1, q[0, 2:], 50, sequence=sequences[3], exact=exact) for exact in (True, False)]
            answers.append([*outs, *(h.scores for h in hits), *(h.positions.float() for h in hits)])
    assert all(same_bits(a, b) for a, b in zip(*answers, strict=True))


def test_queries_of_any_layout_in_memory_are_the_same_query():
    _, seq, _ = filled(ONE_LAYER, flat_config(), 200)
    q = make_query(ONE_LAYER, 15)
    apart = torch.stack([q, random((4, 16), 0)], dim=2)[:, :, 0]
    assert not apart.is_contiguous()
    assert same_bits(seq.attend(0, apart), seq.attend(0, q))
    assert same_bits(seq.attend(0, q.T.contiguous().T), seq.attend(0, q))
