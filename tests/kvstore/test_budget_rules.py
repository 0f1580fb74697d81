"""Budgets that are functions of layer, KV head and length."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import ConfigError, KVStore
from kvstore.budget import head_budgets
from tests import oracles
from tests.builders import SCHEMA, contents, fill, filled, flat_config, make_query, pq_config, same_bits

HEADS = SCHEMA.n_kv_heads
both = pytest.mark.parametrize("config", [flat_config(), pq_config(over_fetch=9.0)], ids=["flat", "pq"])


def expected(q, keys, values, config, wanted):
    """Attention where KV head h may read wanted[h] rows, sinks and window included."""
    n = keys.shape[1]
    start, stop = config.sinks, n - config.window
    rows = []
    for head in range(HEADS):
        k = min(stop - start, max(wanted[head] - (n - stop + start), config.min_selected))
        rows.append(oracles.selective_rows(q, keys, SCHEMA.scale, start, stop, k, config.reduce)[head])
    return oracles.attention(q, keys, values, SCHEMA.scale, rows)


@both
@given(st.lists(st.integers(1, 130), min_size=HEADS, max_size=HEADS))
@settings(max_examples=25)
def test_every_head_reads_as_many_rows_as_the_rule_allows(config, wanted):
    _, seq, rows = filled(SCHEMA, config, 120)
    q = make_query(SCHEMA, 3)
    for layer, (keys, values) in enumerate(rows):
        out = seq.attend(layer, q, budget=lambda _, head, __: wanted[head])
        covers = seq._indexes[layer].covered or (config.sinks, 120 - config.window)
        if covers == (config.sinks, 120 - config.window):
            np.testing.assert_allclose(out, expected(q, keys, values, config, wanted), rtol=2e-5, atol=2e-5)


@both
@pytest.mark.parametrize("allowance", [None, 1, 30, 10**6, 0.3, 1.0])
def test_a_rule_that_always_says_the_same_is_that_budget(config, allowance):
    _, seq, _ = filled(SCHEMA, config, 120)
    q = make_query(SCHEMA, 4)
    for layer in range(SCHEMA.n_layers):
        ruled = seq.attend(layer, q, budget=lambda *_: allowance)
        assert same_bits(ruled, seq.attend(layer, q, budget=allowance))


def test_a_rule_is_asked_for_each_layer_and_head_at_the_length_of_the_moment():
    asked = []

    def rule(layer, head, n_rows):
        asked.append((layer, head, n_rows))
        return max(24, n_rows // 3)

    store = KVStore(SCHEMA, flat_config(budget=rule))
    seq = store.create("book")
    read = []
    for _ in range(3):
        fill(seq, 100)
        for layer in range(SCHEMA.n_layers):
            seq.attend(layer, make_query(SCHEMA, 1))
        read.append(seq.explain(0, make_query(SCHEMA, 1)).plan.n_attended)
    assert set(asked) == {(i, h, n) for i in range(SCHEMA.n_layers) for h in range(HEADS) for n in (100, 200, 300)}
    assert read == [33, 66, 100]


@both
def test_a_batch_of_rules_gives_what_single_calls_give(config):
    store = KVStore(SCHEMA, config)
    sequences = [store.create(name) for name in "abc"]
    budgets = [lambda _, head, n: n // (2 + head), 40, lambda layer, head, n: 0.2 + 0.1 * head]
    for i, (seq, budget) in enumerate(zip(sequences, budgets, strict=True)):
        fill(seq, 100 + 30 * i, seed=i)
        seq.budget = budget
    q = torch.stack([make_query(SCHEMA, i) for i in range(3)])
    for layer in range(SCHEMA.n_layers):
        out = store.attend(layer, sequences, q)
        for i, seq in enumerate(sequences):
            assert same_bits(out[i], seq.attend(layer, q[i]))


def test_explain_names_the_smallest_and_the_largest_choice_and_measures_both():
    _, seq, _ = filled(SCHEMA, flat_config(), 120)
    seq.budget = lambda layer, head, n: 30 + 20 * head
    explained = seq.explain(0, make_query(SCHEMA, 1), analyze=True)
    plan, chosen = explained.plan, explained.measured.chosen
    wanted = [20 + 20 * head for head in range(HEADS)]
    assert plan.by_head == tuple((n, n) for n in wanted)
    assert f"{wanted[0]} to {wanted[-1]} a KV head" in str(explained)
    assert (chosen >= 0).sum(axis=1).tolist() == wanted
    assert 0 < explained.measured.mass <= 1


def another_rule(*_):
    return 3


WRONG = [0, -3, 1.5, float("nan"), True, "half", another_rule]


@pytest.mark.parametrize("wrong", WRONG, ids=[*map(repr, WRONG[:-1]), "a rule"])
def test_a_rule_that_returns_no_allowance_is_an_error_and_changes_nothing(wrong):
    store, seq, _ = filled(SCHEMA, flat_config(), 120)
    before = contents(store)
    with pytest.raises(ConfigError, match="budget"):
        seq.attend(0, make_query(SCHEMA, 1), budget=lambda *_: wrong)
    assert contents(store) == before


def test_heads_that_may_read_equally_many_need_no_list():
    assert head_budgets(lambda *_: 7, 0, 3, 100) == (7,)
    assert head_budgets(0.5, 0, 3, 100) == (50,)
    assert head_budgets(lambda _, head, n: head + 1, 0, 3, 100) == (1, 2, 3)
