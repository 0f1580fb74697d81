"""The index inside the store: it covers the right rows, codes their keys, and changes nothing it should not."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import ConfigError, IndexConfig, KVStore, RopeSpec, Schema
from kvstore.index.registry import make_index
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

# Each layer turns its keys by other angles, so that an index that took another layer's would not fit.
ROPE_SCHEMA = dataclasses.replace(
    SCHEMA, rope=(RopeSpec.from_theta(10000.0, 16), RopeSpec.from_theta(50.0, 16)), fingerprint="with RoPE"
)
SCHEMAS = [SCHEMA, ROPE_SCHEMA]
each_space = pytest.mark.parametrize("schema", SCHEMAS, ids=["raw", "rope"])


def decode_tokens(seq, rows, start, stop):
    """Append tokens [start, stop) one step each."""
    for at in range(start, stop):
        append(seq, cut(rows, at, at + 1))


def turned(keys, positions, spec, direction=1.0):
    """RoPE (`direction` 1) or its inverse (-1) of keys [n, dim], half layout, in float64."""
    x = oracles.wide(keys) if isinstance(keys, torch.Tensor) else np.asarray(keys, float)
    angles = direction * np.outer(positions, spec.inv_freq)
    first, second = np.split(x, 2, axis=1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def distances_of_codes(seq, layer, head):
    """Squared distance of each covered row's key to what its code stands for, and to the nearest there is."""
    index = seq._indexes[layer].index
    rows = np.arange(*seq._indexes[layer].covered)
    keys, decoded = seq.read(layer)[0][head, rows], index.decode(head, rows)
    found = ((oracles.wide(keys) - decoded) ** 2).sum(axis=1)
    spec = seq._schema.rope[layer] if seq._schema.rope else None
    plain = turned(keys, seq.positions()[rows], spec, -1.0) if spec else oracles.wide(keys)
    parts = np.split(plain[:, index.layout.order_array], index.layout.m, axis=1)
    nearest = np.zeros(len(rows))
    for part, centroids in zip(parts, index.codebook.centroids[head].astype(float), strict=True):
        nearest += ((part[:, None] - centroids[None]) ** 2).sum(axis=2).min(axis=1)
    return found, nearest


def assert_codes_are_those_of_their_rows(seq):
    for layer in range(seq._schema.n_layers):
        for head in range(seq._schema.n_kv_heads):
            found, nearest = distances_of_codes(seq, layer, head)
            np.testing.assert_allclose(found, nearest, rtol=1e-3, atol=1e-3)


def by_hand(seq, layer, first_stop, config):
    """An index made from what can be read: trained on the rows up to first_stop, then given all covered rows."""
    spec = seq._schema.rope[layer] if seq._schema.rope else None
    start, stop = seq._indexes[layer].covered
    settings = {"first_row": start, "rope": spec, "seed": config.index.seed, **config.index.options}
    index = make_index("pq", seq._schema.n_kv_heads, seq._schema.head_dim, **settings)
    keys, positions = seq.read(layer)[0].numpy(), seq.positions()
    index.train(keys[:, start:first_stop].copy(), positions[start:first_stop])
    index.add(keys[:, start:stop].copy(), positions[start:stop])
    return index


# ---- which rows are covered, and by which codes ----


@each_space
def test_codes_of_rows_that_left_the_window_are_those_of_their_keys_in_every_layer(schema):
    rows = make_rows(schema, 160, seed=1)
    seq = KVStore(schema, pq_config()).create("book")
    append(seq, cut(rows, 0, 60))
    for at in range(60, 160, 20):
        decode_tokens(seq, rows, at, at + 20)
        assert_codes_are_those_of_their_rows(seq)
    assert seq._indexes[0].covered == seq._indexes[1].covered == (2, 148)


@each_space
def test_positions_given_by_the_caller_are_those_that_codes_are_made_with(schema):
    seq = KVStore(schema, pq_config()).create("book")
    append(seq, make_rows(schema, 60, seed=2), positions=range(500, 560))
    append(seq, make_rows(schema, 40, seed=3), positions=range(10, 50))
    assert_codes_are_those_of_their_rows(seq)


@each_space
def test_the_index_equals_one_built_by_hand_from_the_rows(schema):
    config = pq_config()
    rows = make_rows(schema, 130, seed=4)
    seq = KVStore(schema, config).create("book")
    append(seq, cut(rows, 0, 70))
    decode_tokens(seq, rows, 70, 130)
    for layer in range(2):
        twin = by_hand(seq, layer, 62, config)
        assert np.array_equal(twin.codes, seq._indexes[layer].index.codes)
        assert np.array_equal(twin.codebook.centroids, seq._indexes[layer].index.codebook.centroids)


CHUNKS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@settings(max_examples=25)
@given(CHUNKS, st.integers(0, 9), st.integers(1, 20), st.integers(1, 40), st.integers(1, 20), st.integers(0, 7))
def test_coverage_follows_the_window_and_never_enters_it(chunks, sinks, window, min_rows, append_rows, first_row):
    config = pq_config(min_rows, append_rows, sinks=sinks, window=window)
    schema = dataclasses.replace(SCHEMA, n_layers=1)
    seq = KVStore(schema, config).create("book", first_row=first_row)
    start = first_row + sinks
    for i, n in enumerate(chunks):
        fill(seq, n, seed=i)
        seq._check()
        left = len(seq) - window - start  # rows between sinks and window
        covered = seq._indexes[0].covered
        if covered is None:
            assert left < min_rows
        else:
            assert covered[0] == start
            assert 0 <= start + left - covered[1] < append_rows


def test_no_index_is_built_before_there_are_enough_rows():
    config = pq_config(min_rows=50)
    store, seq, _ = filled(SCHEMA, config, 59)
    assert store.stats().index_builds == 0
    fill(seq, 1, seed=1)
    assert store.stats().index_builds == 2
    assert seq._indexes[1].covered == (2, 52)


def test_rows_of_an_open_step_are_not_covered_before_they_are_committed():
    _, seq, _ = filled(SCHEMA, pq_config(), 60)
    rows = make_rows(SCHEMA, 40, seed=1)
    with seq.step():
        for layer in range(2):
            seq.append(layer, *rows[layer])
            assert seq._indexes[layer].covered == (2, 52)
    assert seq._indexes[0].covered == seq._indexes[1].covered == (2, 92)


def test_a_failed_step_leaves_the_index_as_it_was():
    _, seq, _ = filled(SCHEMA, pq_config(), 60)
    before = [keeper.index.codes.copy() for keeper in seq._indexes]
    with pytest.raises(RuntimeError), seq.step():
        seq.append(0, *make_rows(SCHEMA, 60, seed=1)[0])
        raise RuntimeError
    assert all(np.array_equal(a, keeper.index.codes) for a, keeper in zip(before, seq._indexes, strict=True))
    fill(seq, 60, seed=2)
    assert_codes_are_those_of_their_rows(seq)


@each_space
@pytest.mark.parametrize("keep", [0, 1, 5, 30, 59, 90])
def test_codes_after_a_truncate_are_those_of_the_new_rows(schema, keep):
    store, seq, _ = filled(schema, pq_config(), 100)
    seq.truncate(keep)
    store._check()
    assert seq._indexes[0].covered[1] <= max(2, keep - 8)
    fill(seq, 90, seed=1)
    store._check()
    assert seq._indexes[0].covered == (2, keep + 82)
    assert_codes_are_those_of_their_rows(seq)


@each_space
def test_a_fork_codes_its_own_rows_and_leaves_its_origin_alone(schema):
    store, seq, _ = filled(schema, pq_config(), 100)
    child = seq.fork("child")
    assert np.array_equal(child._indexes[1].index.codes, seq._indexes[1].index.codes)
    child.truncate(70)
    for i in range(20):
        fill(child, 3, seed=10 + i)
        fill(seq, 2, seed=40 + i)
    store._check()
    for who in (seq, child):
        assert_codes_are_those_of_their_rows(who)
    assert store.stats().indexed_rows == 2 * (seq._indexes[0].index.n_rows + child._indexes[0].index.n_rows)


# ---- reindex ----


@each_space
def test_reindex_trains_again_on_all_rows_between_sinks_and_window(schema):
    config = pq_config()
    store, seq, _ = filled(schema, config, 60)
    append(seq, [(5 + keys, values) for keys, values in make_rows(schema, 95, seed=1)])  # the keys have drifted
    before = sum(distances_of_codes(seq, 0, 0)[0])
    seq.reindex()
    assert store.stats().index_builds == 4
    for layer in range(2):
        assert seq._indexes[layer].covered == (2, 147)
        twin = by_hand(seq, layer, 147, config)
        assert np.array_equal(twin.codes, seq._indexes[layer].index.codes)
    assert sum(distances_of_codes(seq, 0, 0)[0]) < before / 2


def test_reindex_of_one_layer_leaves_the_others():
    store, seq, _ = filled(SCHEMA, pq_config(), 60)
    fill(seq, 60, seed=1)
    other = seq._indexes[0].index
    seq.reindex(1)
    assert seq._indexes[0].index is other
    assert store.stats().index_builds == 3


def test_reindex_builds_an_index_for_rows_that_were_too_few_by_themselves():
    _, seq, _ = filled(SCHEMA, pq_config(min_rows=1000), 60)
    assert seq._indexes[0].covered is None
    seq.reindex()
    assert seq._indexes[0].covered == seq._indexes[1].covered == (2, 52)
    fill(seq, 20, seed=1)
    assert_codes_are_those_of_their_rows(seq)


@pytest.mark.parametrize("n", [0, 1, 10])
def test_reindex_without_rows_in_the_middle_does_nothing(n):
    store, seq, _ = filled(SCHEMA, pq_config(), n)
    seq.reindex()
    assert store.stats().index_builds == 0


def test_reindex_with_a_flat_config_does_nothing():
    store, seq, _ = filled(SCHEMA, flat_config(), 100)
    seq.reindex()
    assert store.stats().index_builds == 0
    assert seq.explain(0, make_query(SCHEMA, 0)).plan.method == "flat"


def test_a_build_that_fails_leaves_rows_and_index(monkeypatch):
    store, seq, rows = filled(SCHEMA, pq_config(), 100)
    index = seq._indexes[0].index
    q = make_query(SCHEMA, 0)
    before = seq.attend(0, q)

    def out_of_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(type(index), "train", out_of_memory)
    with pytest.raises(MemoryError):
        seq.reindex()
    store._check()
    assert seq._indexes[0].index is index
    assert same_bits(seq.attend(0, q), before)
    assert same_bits(seq.read(1)[0], rows[1][0])


@pytest.mark.parametrize(
    "index",
    [
        IndexConfig("no such kind"),
        IndexConfig("pq", {"m": 3}),
        IndexConfig("pq", {"bits": 9}),
        IndexConfig("pq", {"space": "rope"}),
        IndexConfig("pq", {"colour": "red"}),
    ],
    ids=lambda index: f"{index.kind} {index.options}",
)
def test_settings_that_no_index_can_be_made_with_are_refused_when_the_store_is_made(index):
    with pytest.raises(ConfigError):
        KVStore(SCHEMA, flat_config(index=index))


# ---- what attend does with it ----


@each_space
@pytest.mark.parametrize("n", [43, 100, 700, 3000])
@pytest.mark.parametrize("waiting", [0, 6])
def test_attention_is_exact_over_the_rows_that_explain_names(schema, n, waiting):
    rows = make_rows(schema, n, seed=6)
    store = KVStore(schema, pq_config())
    seq = store.create("book")
    append(seq, cut(rows, 0, n - waiting))
    decode_tokens(seq, rows, n - waiting, n)
    for layer, (keys, values) in enumerate(rows):
        q = make_query(schema, layer)
        explained = seq.explain(layer, q, analyze=True)
        plan, chosen = explained.plan, explained.measured.chosen
        assert plan.method == "index"
        assert (plan.sinks_stop, plan.tail_start) == (2, n - 8 - waiting)
        assert ((chosen >= 2) & (chosen < plan.tail_start)).all()
        assert (np.diff(chosen, axis=1) > 0).all()
        read = [[*range(2), *chosen[head], *range(plan.tail_start, n)] for head in range(2)]
        assert all(len(r) == 24 for r in read)
        expected = oracles.attention(q, keys, values, 0.25, read)
        np.testing.assert_allclose(seq.attend(layer, q), expected, rtol=1e-4, atol=1e-5)


@each_space
@pytest.mark.parametrize("reduce", ["sum_softmax", "max", "mean"])
@pytest.mark.parametrize("over_fetch", [1.0, 2.0, 1000.0])
def test_the_codes_propose_and_the_exact_scores_choose(schema, over_fetch, reduce):
    """Candidates are the best rows by q . decode(code); of them the best by q . key are read."""
    config = pq_config(over_fetch=over_fetch, reduce=reduce)
    _, seq, rows = filled(schema, config, 210)
    q, keys = make_query(schema, 3), rows[1][0]
    explained = seq.explain(1, q, analyze=True)
    start, stop = explained.plan.sinks_stop, explained.plan.tail_start
    index = seq._indexes[1].index
    for head in range(2):
        mine = q[2 * head : 2 * head + 2]
        decoded = torch.from_numpy(index.decode(head, np.arange(start, stop)))
        n_candidates = min(stop - start, round(over_fetch * 14))
        approximate = oracles.group_scores(mine, decoded, 0.25, reduce)
        candidates = start + np.sort(oracles.best(np.round(approximate, 6), n_candidates))
        exact = oracles.group_scores(mine, keys[head, candidates], 0.25, reduce)
        picked = np.sort(candidates[oracles.best(exact, 14)])
        assert explained.measured.chosen[head].tolist() == picked.tolist()


@each_space
def test_rows_that_wait_to_be_coded_are_read_exactly(schema):
    rows = make_rows(schema, 106, seed=7)
    q = make_query(schema, 4)
    seq = KVStore(schema, pq_config(append_rows=8)).create("book")
    append(seq, cut(rows, 0, 100))
    decode_tokens(seq, rows, 100, 106)
    assert seq._indexes[0].covered == (2, 92)
    read = seq.explain(0, q, analyze=True)
    assert read.plan.tail_start == 92  # row 92 left the window six steps ago
    assert read.plan.n_attended == 24


@each_space
@pytest.mark.parametrize("budget", [None, 1.0, 1000])
def test_with_a_budget_for_all_rows_the_index_does_not_matter(schema, budget):
    _, seq, rows = filled(schema, pq_config(), 300)
    q = make_query(schema, 5)
    for layer, (keys, values) in enumerate(rows):
        expected = oracles.attention(q, keys, values, 0.25)
        np.testing.assert_allclose(seq.attend(layer, q, budget=budget), expected, rtol=1e-4, atol=1e-5)


# ---- what topk does with it ----


@each_space
def test_topk_through_the_index_scores_what_it_finds_exactly(schema):
    store, _seq, rows = filled(schema, pq_config(), 300)
    caught = []
    for seed in range(20):
        q, head = make_query(schema, seed)[0], seed % 2
        scores = oracles.wide(rows[1][0][head]) @ oracles.wide(q)
        found = store.topk(1, head, q, 20)
        assert not found.exact
        np.testing.assert_allclose(found.scores, scores[found.positions], rtol=1e-4, atol=1e-4)
        assert (found.scores.diff() <= 0).all()
        caught.append(len(set(found.positions.tolist()) & set(oracles.best(scores, 20))))
        exact = store.topk(1, head, q, 20, exact=True)
        assert exact.exact
        assert exact.positions.tolist() == oracles.best(scores, 20)
    assert np.mean(caught) >= 10  # 40 candidates at random would hold 2.7 of them; these keys are noise, codes one byte


@each_space
@pytest.mark.parametrize("row", [0, 1, 150, 289, 292, 295, 299])
def test_topk_finds_the_best_row_wherever_it_lies(schema, row):
    """Sinks, middle, rows that wait, window: no row may fall between them."""
    rows = make_rows(schema, 300, seed=8)
    q = make_query(schema, 7)[0]
    for keys, _ in rows:
        keys[:, row] = 3 * q
    seq = KVStore(schema, pq_config()).create("book")
    append(seq, cut(rows, 0, 296))
    decode_tokens(seq, rows, 296, 300)
    for layer in range(2):
        assert seq.topk(layer, 1, q, 5).positions[0] == row
        if 2 <= row < 292:
            assert seq.topk(layer, 1, q, 5, rows="middle").positions[0] == row


def test_topk_of_every_row_passes_by_the_index():
    store, seq, _ = filled(SCHEMA, pq_config(), 100)
    found = store.topk(0, 0, make_query(SCHEMA, 8)[0], 100)
    assert found.exact
    assert sorted(found.positions.tolist()) == list(range(100))
    middle = seq.topk(0, 0, make_query(SCHEMA, 8)[0], 100, rows="middle")
    assert sorted(middle.positions.tolist()) == list(range(2, 92))


@pytest.mark.parametrize("reduce", ["sum_softmax", "max", "mean"])
def test_group_scores_through_the_index_are_those_of_the_rows_found(reduce):
    store, _, rows = filled(SCHEMA, pq_config(over_fetch=1000.0), 300)
    q = make_query(SCHEMA, 9, size=0.5)
    scores = oracles.group_scores(q[:2], rows[0][0][0], 0.25, reduce)
    found = store.topk(0, 0, q[:2], 15, reduce=reduce)
    oracles.assert_best_rows(found.positions, scores, 15)
    tolerance = {"sum_softmax": 0.2, "max": 1e-4, "mean": 1e-4}[reduce]  # of a softmax the index estimates the norm
    np.testing.assert_allclose(found.scores, scores[found.positions], rtol=tolerance)


# ---- alone or together, one thread or two ----


def run_one(store, name, schema, seed, steps):
    """Prefill and decode one sequence; yields what each step gave."""
    rows = make_rows(schema, 100 + steps, seed=seed)
    seq = store.create(name)
    append(seq, cut(rows, 0, 100))
    for i in range(steps):
        outs = []
        with seq.step():
            for layer in range(schema.n_layers):
                seq.append(layer, *cut(rows, 100 + i, 101 + i)[layer])
                outs.append(seq.attend(layer, make_query(schema, seed + i)))
        yield [*outs, *(torch.from_numpy(keeper.index.codes.astype(np.float32)) for keeper in seq._indexes)]


@each_space
def test_sequences_in_turn_give_what_each_gives_alone_bit_for_bit(schema):
    store = KVStore(schema, pq_config())
    walks = [run_one(store, f"s{i}", schema, i, 25) for i in range(4)]
    together = list(zip(*walks, strict=True))
    for i in range(4):
        alone = run_one(KVStore(schema, pq_config()), "alone", schema, i, 25)
        for step, outs in enumerate(alone):
            assert all(same_bits(a, b) for a, b in zip(outs, together[step][i], strict=True))


@each_space
def test_the_same_seed_and_rows_give_the_same_index_and_choice_with_any_number_of_threads(schema):
    seen = []
    for threads in (1, 2, 1):
        with kernel_threads(threads):
            _, seq, _ = filled(schema, pq_config(seed=3), 3000)
            measured = seq.explain(1, make_query(schema, 0), analyze=True).measured
            index = seq._indexes[1].index
            out = seq.attend(1, make_query(schema, 0))
            seen.append((index.codes.tobytes(), index.codebook.centroids.tobytes(), measured.chosen.tobytes(), out))
    assert seen[0][:3] == seen[1][:3] == seen[2][:3]
    assert same_bits(seen[0][3], seen[1][3])


def test_another_seed_gives_another_index():
    codes = [filled(SCHEMA, pq_config(seed=s), 300)[1]._indexes[0].index.codes.copy() for s in (0, 1)]
    assert not np.array_equal(*codes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rows_are_indexed_as_they_are_stored(dtype):
    schema = dataclasses.replace(SCHEMA, dtype=dtype, n_layers=1)
    _, seq, [(keys, values)] = filled(schema, pq_config(), 150)
    assert_codes_are_those_of_their_rows(seq)
    q = random((4, 16), 3)
    chosen = seq.explain(0, q, analyze=True).measured.chosen
    read = [[*range(2), *chosen[head], *range(142, 150)] for head in range(2)]
    np.testing.assert_allclose(seq.attend(0, q), oracles.attention(q, keys, values, 0.25, read), atol=1e-5)


def test_a_schema_may_know_the_rope_of_some_layers_only():
    schema = Schema(2, 4, 2, 16, block_tokens=16, rope=(RopeSpec.from_theta(10000.0, 16), None))
    _, seq, _ = filled(schema, pq_config(), 100)
    assert [keeper.index.space for keeper in seq._indexes] == ["rope", "raw"]
    assert_codes_are_those_of_their_rows(seq)
