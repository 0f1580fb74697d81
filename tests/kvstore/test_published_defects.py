"""What went wrong in the published implementation of the method, and in stores like it, must not go wrong here.

Each test is about what a request would notice, and compares with float64 attention or with the rows themselves.
"""

import numpy as np
import pytest
import torch

from kvstore import KVStore, Schema
from tests import oracles
from tests.builders import (
    SCHEMA,
    append,
    cut,
    fill,
    flat_config,
    make_query,
    make_rows,
    pq_config,
    random,
    same_bits,
)

FOUR_LAYERS = Schema(n_layers=4, n_q_heads=4, n_kv_heads=2, head_dim=16, block_tokens=16)
ALL_CANDIDATES = pq_config(over_fetch=1000.0)  # the exact scores alone decide
each_config = pytest.mark.parametrize("config", [flat_config(), ALL_CANDIDATES], ids=["flat", "pq"])


def decode(seq, rows, start, stop):
    """Append tokens [start, stop), one step each."""
    for at in range(start, stop):
        append(seq, cut(rows, at, at + 1))


def wanting(key):
    """A query of every head that gives nearly all its attention to the row with this key of length 1."""
    return (1000 * key).expand(4, 16)


@each_config
def test_row_leaving_the_window_is_not_lost(config):
    """The row that leaves the ring of recent rows was overwritten before it had been copied out."""
    schema = Schema(1, 4, 2, 16, block_tokens=16)
    [(keys, values)] = make_rows(schema, 120, seed=1)
    keys = torch.nn.functional.normalize(keys, dim=2)
    keys[1] = keys[0]  # one query for both KV heads
    seq = KVStore(schema, config).create("book")
    append(seq, [(keys[:, :60], values[:, :60])])
    for n in range(61, 121):
        append(seq, [(keys[:, n - 1 : n], values[:, n - 1 : n])])
        for row in range(max(0, n - 12), n):  # those that left the window lately, and those inside
            out = seq.attend(0, wanting(keys[0, row]))
            torch.testing.assert_close(out, values[:, row].repeat_interleave(2, 0), rtol=1e-3, atol=1e-3)
    for row in range(120):
        assert same_bits(seq.fetch(0, 0, [row])[0][0], keys[0, row])
        assert seq.topk(0, 0, keys[0, row], 1).positions.tolist() == [row]


@each_config
def test_every_layer_gets_its_own_row(config):
    """Counters that the first layer advanced made every other layer write one row further."""
    rows = make_rows(FOUR_LAYERS, 100, seed=2)
    seq = KVStore(FOUR_LAYERS, config).create("book")
    append(seq, cut(rows, 0, 50))
    for n in range(51, 101):
        append(seq, cut(rows, n - 1, n))
        for layer, (keys, values) in enumerate(cut(rows, 0, n)):
            assert all(same_bits(a, b) for a, b in zip(seq.read(layer), (keys, values), strict=True))
    for layer, (keys, _) in enumerate(rows):
        keeper = seq._indexes[layer]
        if config is ALL_CANDIDATES:
            assert keeper.covered[1] > 80
            covered = np.arange(*keeper.covered)
            for head in range(2):
                decoded = keeper.index.decode(head, covered)
                own = ((oracles.wide(keys[head, covered]) - decoded) ** 2).sum()
                next_row = ((oracles.wide(keys[head, covered + 1]) - decoded) ** 2).sum()
                other_layer = ((oracles.wide(rows[layer - 1][0][head, covered]) - decoded) ** 2).sum()
                assert own < 0.6 * min(next_row, other_layer)


@pytest.mark.parametrize("config", [flat_config(), pq_config()], ids=["flat", "pq"])
@pytest.mark.parametrize("how", ["dropped", "truncated", "alive"])
def test_second_request_sees_nothing_of_the_first(config, how):
    """Which blocks were resident was not forgotten between requests: the next one read its predecessor's rows."""
    store = KVStore(SCHEMA, config)
    first = store.create("first")
    fill(first, 300, seed=3)
    for i in range(5):
        first.attend(0, make_query(SCHEMA, i))
        first.topk(1, 0, make_query(SCHEMA, i)[0], 20)
    if how == "dropped":
        store.drop("first")
    elif how == "truncated":
        first.truncate(0)
    second, rows = store.create("second"), make_rows(SCHEMA, 310, seed=4)
    alone = KVStore(SCHEMA, config).create("alone")
    for seq in (second, alone):
        append(seq, cut(rows, 0, 290))
    for n in range(291, 311):
        for seq in (second, alone):
            append(seq, cut(rows, n - 1, n))
        for layer in range(2):
            q = make_query(SCHEMA, n)
            assert same_bits(second.attend(layer, q), alone.attend(layer, q))
            found, expected = second.topk(layer, 1, q[2:], 15), alone.topk(layer, 1, q[2:], 15)
            assert torch.equal(found.positions, expected.positions)
            assert same_bits(found.scores, expected.scores)


@pytest.mark.parametrize("n", [100, 127, 128, 129])
def test_only_written_rows_are_indexed(n):
    """Clusters were made of rows that nobody had written: noise, or what the previous request had left there."""
    store = KVStore(SCHEMA, pq_config(arena_bytes=1))
    poison = store.create("poison")
    append(poison, [(torch.full_like(k, 1e6), torch.full_like(v, torch.nan)) for k, v in make_rows(SCHEMA, 300, 0)])
    store.drop("poison")
    seq, rows = store.create("book"), make_rows(SCHEMA, n, seed=5)
    append(seq, rows)  # into blocks full of large numbers and NaN
    fresh = KVStore(SCHEMA, pq_config()).create("book")
    append(fresh, rows)
    for layer in range(2):
        index = seq._indexes[layer].index
        assert seq._indexes[layer].covered == (2, n - 8)
        assert np.abs(index.codebook.centroids).max() <= rows[layer][0].abs().max()
        assert np.array_equal(index.codes, fresh._indexes[layer].index.codes)
        assert same_bits(seq.attend(layer, make_query(SCHEMA, 1)), fresh.attend(layer, make_query(SCHEMA, 1)))


@each_config
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_partly_filled_block_is_read_fresh(config, block_tokens):
    """A block that had been looked at while it was partly filled was never looked at again."""
    schema = Schema(1, 4, 2, 16, block_tokens=block_tokens)
    [(keys, values)] = make_rows(schema, 130, seed=6)
    seq = KVStore(schema, config).create("book")
    for n in range(1, 131):
        append(seq, [(keys[:, n - 1 : n], values[:, n - 1 : n])])
        q = make_query(schema, n)
        expected = oracles.attention(q, keys[:, :n], values[:, :n], 0.25)
        np.testing.assert_allclose(seq.attend(0, q, budget=None), expected, atol=1e-5)
        best = oracles.best(oracles.wide(keys[0, :n]) @ oracles.wide(q[0]), 3)
        assert seq.topk(0, 0, q[0], 3, exact=True).positions.tolist() == best
        assert same_bits(seq.fetch(0, 1, [n - 1])[1][0], values[1, n - 1])
    seq.truncate(120)
    more = random((2, 10, 16), 60), random((2, 10, 16), 61)
    append(seq, [more])
    assert same_bits(seq.fetch(0, 0, range(115, 130))[0], torch.cat([keys[0, 115:120], more[0][0]]))


@pytest.mark.parametrize("n", [33, 100, 1500])
def test_index_is_complete_when_first_queried(n):
    """The first decode step could meet codes that the clustering had only half written."""
    rows, q = make_rows(FOUR_LAYERS, n + 1, seed=7), make_query(FOUR_LAYERS, 8)
    seq = KVStore(FOUR_LAYERS, pq_config(min_rows=8)).create("book")
    append(seq, cut(rows, 0, n))
    with seq.step():  # the first decode step, each layer asked as soon as it has its row
        first = []
        for layer in range(4):
            seq.append(layer, *cut(rows, n, n + 1)[layer])
            keeper = seq._indexes[layer]
            assert keeper.covered == (2, n - 8)
            keeper.index._check()
            first.append((keeper.index.codes.copy(), seq.attend(layer, q)))
        for layer in range(4):
            assert np.array_equal(first[layer][0], seq._indexes[layer].index.codes)
            assert same_bits(first[layer][1], seq.attend(layer, q))


@pytest.mark.parametrize("make_config", [flat_config, pq_config])
def test_prompts_of_1_to_200_tokens(make_config):
    """Short prompts crashed, or left decode with no row but its own; selection must hold from the first row on."""
    config = make_config(dense_rows=0, budget=12, min_selected=4)
    schema = Schema(1, 4, 2, 16, block_tokens=16)
    [(keys, values)] = make_rows(schema, 203, seed=8)
    for n in range(1, 201):
        seq = KVStore(schema, config).create("prompt")
        append(seq, [(keys[:, :n], values[:, :n])])
        for length in range(n, n + 3):
            if length > n:
                append(seq, [(keys[:, length - 1 : length], values[:, length - 1 : length])])
            q = make_query(schema, length)
            explained = seq.explain(0, q, analyze=True)
            plan, chosen = explained.plan, explained.measured.chosen
            read = [[*range(plan.sinks_stop), *chosen[h], *range(plan.tail_start, length)] for h in range(2)]
            assert {*range(min(2, length)), *range(max(0, length - 8), length)} <= set(read[0])
            assert plan.n_attended == len(set(read[0])) >= min(length, 12)
            got = seq.attend(0, q)
            expected = oracles.attention(q, keys[:, :length], values[:, :length], 0.25, read)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
            if plan.method == "flat":
                exact = oracles.selective_rows(q, keys[:, :length], 0.25, 2, length - 8, 4, "sum_softmax")
                assert [sorted(r) for r in read] == [sorted(r) for r in exact]


@pytest.mark.parametrize("short", [1, 2, 10, 11, 33, 34, 52, 64, 96])
def test_request_after_a_short_one_does_not_hang(short):
    """A request too short for an index left the next one waiting for an event that nobody would set."""
    store = KVStore(SCHEMA, pq_config())
    q = make_query(SCHEMA, 1)
    brief = store.create("brief")
    keys, values = fill(brief, short, seed=9)[1]
    brief.attend(0, q)
    np.testing.assert_allclose(brief.attend(1, q, budget=None), oracles.attention(q, keys, values, 0.25), atol=1e-5)
    store.drop("brief")
    long = store.create("long")
    keys, values = fill(long, 300, seed=10)[1]
    np.testing.assert_allclose(long.attend(1, q, budget=None), oracles.attention(q, keys, values, 0.25), atol=1e-5)
    assert long._indexes[1].covered == (2, 292)


def test_a_row_longer_than_all_rows_before_it_gets_the_nearest_code():
    """The longest key of the prompt was baked into a square root, which was NaN for a longer one."""
    schema = Schema(1, 4, 2, 16, block_tokens=16)
    seq = KVStore(schema, pq_config()).create("book")
    fill(seq, 100, seed=11)
    long = 50 * random((2, 40, 16), 12)
    append(seq, [(long, random((2, 40, 16), 13))])
    index = seq._indexes[0].index
    assert seq._indexes[0].covered == (2, 132)
    order, centroids = index.layout.order_array, index.codebook.centroids.astype(float)
    for head in range(2):
        parts = np.split(oracles.wide(long[head, :32])[:, order], index.layout.m, axis=1)
        nearest = [((p[:, None] - c[None]) ** 2).sum(2).argmin(1) for p, c in zip(parts, centroids[head], strict=True)]
        decoded = np.split(index.decode(head, np.arange(100, 132))[:, order], index.layout.m, axis=1)
        for j, part in enumerate(decoded):
            np.testing.assert_allclose(part, centroids[head, j, nearest[j]], rtol=1e-5)


def test_rows_generated_after_the_prompt_are_indexed():
    """A comparison with the wrong dimension kept every generated token out of the index."""
    rows = make_rows(SCHEMA, 400, seed=14)
    seq = KVStore(SCHEMA, pq_config()).create("book")
    append(seq, cut(rows, 0, 50))
    decode(seq, rows, 50, 400)
    for keeper in seq._indexes:
        assert keeper.covered[1] > 400 - 8 - 8
    assert seq.explain(0, make_query(SCHEMA, 1)).plan.method == "index"


def test_a_share_grows_with_the_output():
    """Budgets fixed at the length of the prompt starved long answers to short questions."""
    rows = make_rows(SCHEMA, 600, seed=15)
    seq = KVStore(SCHEMA, pq_config(budget=0.25)).create("book")
    append(seq, cut(rows, 0, 40))
    decode(seq, rows, 40, 600)
    assert seq.explain(0, make_query(SCHEMA, 1)).plan.n_attended == 150


def test_a_constant_added_to_all_keys_does_not_blunt_the_index():
    """Keys of language models share large constant dimensions; a codebook that spends itself on them sees nothing."""
    schema = Schema(1, 4, 2, 16, block_tokens=16)
    [(keys, values)] = make_rows(schema, 600, seed=16)
    shift = torch.zeros(16)
    shift[3], shift[12] = 30.0, -20.0
    q = make_query(schema, 1)
    q[:, 3] = q[:, 12] = 0.0  # what the query does not look at must not change what is found
    found = []
    for moved in (keys, keys + shift):
        seq = KVStore(schema, pq_config()).create("book")
        append(seq, [(moved, values)])
        found.append(seq.topk(0, 0, q[0], 20).positions.tolist())
    best = set(oracles.best(oracles.wide(keys[0]) @ oracles.wide(q[0]), 20))
    caught = [len(best & set(rows)) for rows in found]
    assert caught[1] >= caught[0] - 4
