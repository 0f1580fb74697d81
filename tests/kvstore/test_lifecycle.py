import numpy as np
import pytest
import torch

from kvstore import KVStore, Schema, SequenceExistsError, SequenceNotFoundError, StoreClosedError
from tests import oracles
from tests.builders import (
    SCHEMA,
    append,
    contents,
    cut,
    fill,
    filled,
    flat_config,
    make_query,
    make_rows,
    pq_config,
    same_bits,
)

CONFIGS = [flat_config(), pq_config()]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=["flat", "pq"])


def test_sequences_are_found_by_name():
    store = KVStore(SCHEMA)
    book, talk = store.create("book"), store.create("talk")
    assert store["book"] is book
    assert store["talk"] is talk
    assert list(store) == ["book", "talk"]
    assert len(store) == 2
    assert "book" in store
    assert "tale" not in store
    with pytest.raises(SequenceNotFoundError, match="no sequence is named 'tale'; there are 'book', 'talk'"):
        store["tale"]


def test_a_name_is_used_once_until_it_is_dropped():
    store = KVStore(SCHEMA)
    first = store.create("book")
    with pytest.raises(SequenceExistsError, match=r"use store\['book'\] or drop it"):
        store.create("book")
    store.drop("book")
    second = store.create("book")
    assert second.generation > first.generation
    assert store["book"] is second


def test_names_may_come_and_go_while_a_store_is_walked_through():
    store = KVStore(SCHEMA)
    for name in "abc":
        store.create(name)
    for name in store:
        store.drop(name)
    assert len(store) == 0


@each_config
def test_a_dropped_sequence_gives_back_all_its_blocks_and_cannot_be_used(config):
    store, seq, _ = filled(SCHEMA, config, 100)
    store.drop("book")
    store._check()
    assert store.heap.used_bytes == 0
    assert store.stats().index_bytes == 0
    q = make_query(SCHEMA, 0)
    for call in (
        lambda: seq.attend(0, q),
        lambda: seq.topk(0, 0, q[0], 1),
        lambda: seq.fetch(0, 0, [0]),
        lambda: seq.read(0),
        lambda: seq.truncate(0),
        lambda: seq.fork("x"),
        seq.reindex,
        seq.begin_step,
        lambda: seq.explain(0, q),
        lambda: seq.append(0, *make_rows(SCHEMA, 1, 0)[0]),
        lambda: store.topk(0, 0, q[0], 1, sequence=seq),
        lambda: store.attend(0, [seq], q[None]),
    ):
        with pytest.raises(SequenceNotFoundError, match="'book' has been dropped"):
            call()
    with pytest.raises(SequenceNotFoundError):
        store.drop("book")
    assert list(store) == []


@each_config
def test_a_closed_store_says_so_whatever_is_asked(config):
    store, seq, _ = filled(SCHEMA, config, 100)
    store.close()
    store.close()
    q = make_query(SCHEMA, 0)
    for call in (
        lambda: store["book"],
        lambda: store.create("x"),
        lambda: store.drop("book"),
        store.stats,
        lambda: store.topk(0, 0, q[0], 1),
        lambda: store.topk_heads(0, torch.ones(2, 1, 16), 1),
        lambda: store.attend(0, [seq], q[None]),
        lambda: store.attend(0, [], torch.empty(0, 4, 16)),
        lambda: store.explain(seq, 0, q),
        lambda: seq.attend(0, q),
        lambda: seq.topk(0, 0, q[0], 1),
        lambda: seq.fetch(0, 0, [0]),
        lambda: seq.read(0),
        lambda: seq.truncate(0),
        lambda: seq.fork("x"),
        seq.reindex,
        seq.begin_step,
        seq.commit_step,
        lambda: seq.append(0, *make_rows(SCHEMA, 1, 0)[0]),
    ):
        with pytest.raises(StoreClosedError, match="the store is closed"):
            call()
    assert store.heap.reserved_bytes == 0


def test_a_store_closes_when_its_block_ends_even_by_an_exception():
    with KVStore(SCHEMA) as store:
        fill(store.create("book"), 5)
    with pytest.raises(StoreClosedError):
        store.stats()
    with pytest.raises(KeyError), KVStore(SCHEMA) as other:
        raise KeyError
    with pytest.raises(StoreClosedError):
        other.stats()


def test_closing_inside_a_step_ends_the_step():
    store, seq, _ = filled(SCHEMA, flat_config(), 10)
    with pytest.raises(StoreClosedError), seq.step():
        seq.append(0, *make_rows(SCHEMA, 3, 1)[0])
        store.close()
    assert not seq.step_open


def test_memory_of_dropped_sequences_is_used_again():
    store = KVStore(SCHEMA, flat_config(arena_bytes=1))
    for i in range(20):
        fill(store.create("book"), 100, seed=i)
        store.drop("book")
    assert store.stats().heap_reserved_bytes == 2 * 7 * store.heap.block_bytes


# ---- truncate ----


@each_config
@pytest.mark.parametrize("keep", [0, 1, 2, 9, 10, 11, 16, 47, 48, 49, 299, 300])
def test_what_is_left_of_a_truncate_is_what_came_first(config, keep):
    store, seq, rows = filled(SCHEMA, config, 300)
    seq.truncate(keep)
    store._check()
    assert len(seq) == keep
    assert store.stats().blocks == 2 * -(-keep // 16)
    q = make_query(SCHEMA, 1)
    for layer in range(2):
        keys, values = (x[:, :keep] for x in rows[layer])
        assert same_bits(seq.read(layer)[0], keys)
        assert same_bits(seq.read(layer)[1], values)
        found = seq.topk(layer, 0, q[0], 300)
        assert sorted(found.positions.tolist()) == list(range(keep))
        if keep:
            np.testing.assert_allclose(
                seq.attend(layer, q, budget=None), oracles.attention(q, keys, values, 0.25), atol=1e-5
            )


@each_config
@pytest.mark.parametrize("keep", [0, 1, 9, 30, 150, 290])
def test_rows_after_a_truncate_replace_those_that_were_there(config, keep):
    store, seq, old = filled(SCHEMA, config, 300)
    seq.truncate(keep)
    new = fill(seq, 200, seed=1)
    store._check()
    q = make_query(SCHEMA, 2)
    for layer in range(2):
        keys, values = (torch.cat([a[:, :keep], b], 1) for a, b in zip(old[layer], new[layer], strict=True))
        assert same_bits(seq.read(layer)[0], keys)
        assert same_bits(seq.read(layer)[1], values)
        np.testing.assert_allclose(
            seq.attend(layer, q, budget=None), oracles.attention(q, keys, values, 0.25), atol=1e-5
        )
        hits = seq.topk(layer, 1, q[2], 12, exact=True)
        oracles.assert_best_rows(hits.positions, oracles.wide(keys[1]) @ oracles.wide(q[2]), 12)


def test_positions_are_cut_with_the_rows():
    store = KVStore(SCHEMA, flat_config())
    seq = store.create("book")
    append(seq, make_rows(SCHEMA, 4, 0), positions=[7, 8, 20, 21])
    seq.truncate(3)
    fill(seq, 2, seed=1)
    assert seq.positions().tolist() == [7, 8, 20, 21, 22]


# ---- fork ----


@each_config
def test_a_fork_has_the_same_rows_and_answers_and_takes_no_blocks(config):
    store, seq, _ = filled(SCHEMA, config, 300)
    seq.budget = 30
    blocks = store.stats().blocks
    child = seq.fork("child")
    assert store.stats().blocks == blocks
    state = contents(store)["sequences"]
    assert state["child"] == state["book"]
    for layer in range(2):
        q = make_query(SCHEMA, layer)
        assert same_bits(child.attend(layer, q), seq.attend(layer, q))
        assert torch.equal(child.topk(layer, 0, q[0], 9).positions, seq.topk(layer, 0, q[0], 9).positions)


@each_config
@pytest.mark.parametrize("n", [297, 304])
def test_parent_and_child_go_on_as_if_they_had_never_met(config, n):
    """Each must be, bit for bit, what a sequence is that was filled the same way on its own."""
    store, seq, rows = filled(SCHEMA, config, n)
    child = seq.fork("child")
    mine, its = make_rows(SCHEMA, 60, seed=1), make_rows(SCHEMA, 60, seed=2)
    for at in range(0, 60, 20):
        append(child, cut(its, at, at + 20))
        append(seq, cut(mine, at, at + 20))
        store._check()
    for who, more in ((seq, mine), (child, its)):
        lone = KVStore(SCHEMA, config).create("lone")
        append(lone, rows)
        for at in range(0, 60, 20):
            append(lone, cut(more, at, at + 20))
        assert len(who) == n + 60
        for layer in range(2):
            q = make_query(SCHEMA, 3)
            assert all(same_bits(a, b) for a, b in zip(who.read(layer), lone.read(layer), strict=True))
            assert same_bits(who.attend(layer, q), lone.attend(layer, q))


@each_config
@pytest.mark.parametrize("dropped", ["book", "child"])
def test_either_of_two_that_share_blocks_may_go_first(config, dropped):
    store, seq, rows = filled(SCHEMA, config, 100)
    seq.fork("child")
    store.drop(dropped)
    store._check()
    [left] = [store[name] for name in store]
    assert all(same_bits(left.read(i)[0], rows[i][0]) for i in range(2))
    fill(left, 40, seed=1)  # writes to the block that was shared
    assert all(same_bits(left.read(i, 0, 100)[1], rows[i][1]) for i in range(2))
    store.drop(left.name)
    assert store.heap.used_blocks == 0


def test_a_fork_of_a_fork_of_a_truncated_sequence_is_its_own():
    store, seq, rows = filled(SCHEMA, flat_config(), 100)
    child = seq.fork("child")
    child.truncate(50)
    grandchild = child.fork("grandchild")
    new = [fill(who, 10, seed=i) for i, who in enumerate((seq, child, grandchild))]
    store._check()
    for who, keep, more in zip((seq, child, grandchild), (100, 50, 50), new, strict=True):
        expected = torch.cat([rows[1][0][:, :keep], more[1][0]], 1)
        assert same_bits(who.read(1)[0], expected)


def test_a_fork_under_a_name_that_is_taken_changes_nothing():
    store, seq, _ = filled(SCHEMA, flat_config(), 20)
    before = contents(store)
    with pytest.raises(SequenceExistsError):
        seq.fork("book")
    assert contents(store) == before
    store._check()


def test_a_fork_keeps_the_padding_of_its_origin():
    store = KVStore(Schema(1, 4, 2, 16, block_tokens=16), flat_config())
    seq = store.create("padded", first_row=7)
    fill(seq, 50)
    child = seq.fork("child")
    assert child.first_row == 7
    q = make_query(SCHEMA, 0)
    assert same_bits(child.attend(0, q), seq.attend(0, q))
    assert child.positions(5, 9).tolist() == [-2, -1, 0, 1]
