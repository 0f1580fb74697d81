import json

import pytest

from kvstore import KVStore, Schema
from tests.builders import SCHEMA, append, fill, filled, flat_config, make_query, make_rows, pq_config


def blocks_of(*lengths, layers=2, block_tokens=16):
    return layers * sum(-(-n // block_tokens) for n in lengths)


def test_an_empty_store_holds_nothing():
    stats = KVStore(SCHEMA).stats().as_dict()
    counters = stats.pop("counters")
    assert set(stats.values()) == {0}
    assert counters.pop("attends") == {"dense": 0, "flat": 0, "index": 0}
    assert set(counters.values()) == {0}


def test_sizes_equal_a_recount():
    config = pq_config()
    store = KVStore(SCHEMA, config)
    for name, n in (("a", 5), ("b", 100), ("c", 333)):
        fill(store.create(name), n)
    stats = store.stats()
    assert (stats.sequences, stats.rows, stats.blocks) == (3, 438, blocks_of(5, 100, 333))
    assert stats.heap_used_bytes == stats.blocks * SCHEMA.block_bytes  # a multiple of a cache line here
    assert stats.heap_reserved_bytes >= stats.heap_used_bytes
    assert stats.indexed_rows == 2 * (90 + 323)
    assert stats.index_builds == 4
    assert stats.index_bytes_per_key == 1.0  # two codes of four bits
    assert stats.index_bytes == sum(k.index.nbytes for s in store for k in store[s]._indexes if k.index)
    assert stats.index_bytes >= stats.indexed_rows * 2 * stats.index_bytes_per_key


def test_sizes_follow_truncate_fork_and_drop():
    store, seq, _ = filled(SCHEMA, flat_config(), 100)
    seq.truncate(33)
    assert store.stats().blocks == blocks_of(33)
    child = seq.fork("child")
    assert (store.stats().rows, store.stats().blocks) == (66, blocks_of(33))
    fill(child, 1, seed=1)
    assert store.stats().blocks == blocks_of(33) + 2  # the open block of each layer was copied
    store.drop("book")
    assert (store.stats().sequences, store.stats().rows, store.stats().blocks) == (1, 34, blocks_of(34))


def test_padding_to_a_cache_line_is_counted():
    schema = Schema(1, 1, 1, 3, block_tokens=1)
    store = KVStore(schema, flat_config())
    fill(store.create("a"), 5)
    assert store.stats().heap_used_bytes == 5 * 64


def test_queries_are_counted_by_how_they_were_answered():
    config = pq_config(budget=24)
    store = KVStore(SCHEMA, config)
    short, unindexed, indexed = (store.create(name) for name in ("short", "unindexed", "indexed"))
    fill(short, 20)
    fill(unindexed, 33)
    fill(indexed, 100)
    q = make_query(SCHEMA, 0)
    for seq, times in ((short, 1), (unindexed, 2), (indexed, 3)):
        for _ in range(times):
            seq.attend(0, q)
    store.attend(1, [short, unindexed, indexed], q.expand(3, 4, 16))
    counters = store.stats().counters
    assert counters.attends == {"dense": 2, "flat": 3, "index": 4}
    assert counters.rows_attended == 2 * 20 + 3 * 24 + 4 * 24
    assert counters.rows_available == 2 * 20 + 3 * 33 + 4 * 100
    indexed.topk(0, 0, q[0], 3)
    store.topk_heads(0, q.view(2, 2, 16), 3, sequence=short)
    assert store.stats().counters.topks == 2


def test_looking_is_not_counted():
    store, seq, _ = filled(SCHEMA, pq_config(), 100)
    seq.explain(0, make_query(SCHEMA, 0), analyze=True)  # takes its scratch memory
    before = store.stats()
    seq.explain(0, make_query(SCHEMA, 0), analyze=True)
    seq.fetch(0, 0, [1])
    seq.read(0)
    assert store.stats() == before


def test_steps_are_counted_once_for_all_layers():
    store, seq, _ = filled(SCHEMA, flat_config(), 10)
    for i in range(3):
        append(seq, make_rows(SCHEMA, 2, i))
    with pytest.raises(KeyError), seq.step():
        seq.append(0, *make_rows(SCHEMA, 2, 0)[0])
        raise KeyError
    assert (store.stats().counters.steps, store.stats().counters.aborted_steps) == (4, 1)


def test_padding_rows_are_not_available():
    store = KVStore(SCHEMA, flat_config())
    seq = store.create("padded", first_row=10)
    fill(seq, 30)
    seq.attend(0, make_query(SCHEMA, 0))
    assert store.stats().counters.rows_available == 20


def test_statistics_are_of_one_moment():
    store, seq, _ = filled(SCHEMA, flat_config(), 10)
    before = store.stats()
    as_numbers = before.as_dict()
    seq.attend(0, make_query(SCHEMA, 0))
    seq.topk(0, 0, make_query(SCHEMA, 0)[0], 1)
    fill(seq, 5, seed=1)
    assert before.as_dict() == as_numbers
    assert store.stats() != before


def test_statistics_are_plain_numbers():
    store, seq, _ = filled(SCHEMA, pq_config(), 100)
    seq.attend(0, make_query(SCHEMA, 0))
    as_numbers = store.stats().as_dict()
    assert json.loads(json.dumps(as_numbers)) == as_numbers
