"""Sequences that the heap cannot hold: their blocks lie on the disk, and every answer is that of a store in memory."""

import dataclasses

import numpy as np
import pytest
import torch

from kvstore import HeapFullError, IndexConfig, KVStore, RopeSpec, Schema, StorageError
from tests.builders import append, cut, fill, flat_config, make_query, make_rows, pq_config, same_bits

MIB = 1 << 20
SCHEMA = Schema(n_layers=2, n_q_heads=8, n_kv_heads=4, head_dim=64, block_tokens=16)  # 8 blocks of 32 KiB an extent
ROPE_SCHEMA = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(1e4, SCHEMA.head_dim),) * SCHEMA.n_layers)
BLOCK_BYTES = SCHEMA.block_bytes
HEAP_BLOCKS = 40  # of both layers: 320 rows
N_ROWS = 1000


def limited(config, **changes):
    settings = {"heap_bytes": HEAP_BLOCKS * BLOCK_BYTES, "pool_bytes": 6 * BLOCK_BYTES, "arena_bytes": BLOCK_BYTES}
    return dataclasses.replace(config, spill_bytes=64 * MIB, **(settings | changes))


def rope_config():
    return flat_config(index=IndexConfig("pq", {"m": 4, "bits": 4}, min_rows=24, append_rows=8), budget=0.2)


CONFIGS = {
    "raw": (SCHEMA, pq_config()),
    "rope": (ROPE_SCHEMA, rope_config()),
    "flat": (SCHEMA, flat_config()),
    "dense": (SCHEMA, flat_config(budget=None)),
    "sparq": (SCHEMA, flat_config(index=IndexConfig("sparq", {"rank": 8}, min_rows=24, append_rows=8))),
    "page": (SCHEMA, flat_config(index=IndexConfig("page", min_rows=24, append_rows=8))),
    "by head": (SCHEMA, dataclasses.replace(pq_config(), budget=lambda layer, head, rows: 20 + 8 * head)),
}
every_config = pytest.mark.parametrize(("schema", "config"), list(CONFIGS.values()), ids=list(CONFIGS))


def grow(seq, rows, step=150):
    """Append in steps that the heap can hold."""
    for start in range(0, rows[0][0].shape[1], step):
        append(seq, cut(rows, start, start + step))


def pair(tmp_path, schema, config, n=N_ROWS, seed=1, **changes):
    """The same rows in a store in memory and in one whose heap holds a third of them."""
    rows = make_rows(schema, n, seed)
    here, there = KVStore(schema, config), KVStore.open(tmp_path / "s", schema, limited(config, **changes))
    ours, theirs = here.create("book"), there.create("book")
    grow(ours, rows)
    grow(theirs, rows)
    return here, there, ours, theirs


def answers(store, seq, schema):
    found = []
    for layer in range(schema.n_layers):
        for i in range(3):
            q = make_query(schema, i)
            found.append(seq.attend(layer, q))
            hits = store.topk(layer, 1, q[2:4], 40, sequence=seq)
            found += [hits.positions.float(), hits.scores]
            hits = store.topk(layer, 0, q[0], 30, sequence=seq, exact=True)
            found += [hits.positions.float(), hits.scores]
        mass = store.topk(layer, 0, q[:2], mass=0.5, sequence=seq)
        found += [mass.positions.float(), mass.scores, store.range(layer, 0, q[0], 3.0, sequence=seq).scores]
    return found


def all_same(ours, theirs):
    return len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def on_disk(seq):
    """Blocks of a sequence that are not in the heap."""
    return sum(table.n_spilled for table in seq._tables)


def check(store):
    store._check()
    store._persistence._archive._check()
    if store._spill_pool.in_use:
        store._spill_pool.frames._check()
        assert store._spill_pool.frames.stats().pinned_frames == 0


# ---- answers ----


@every_config
def test_answers_are_those_of_a_store_in_memory_bit_for_bit(tmp_path, schema, config):
    here, there, ours, theirs = pair(tmp_path, schema, config)
    with here, there:
        assert on_disk(theirs) > 60
        assert there.stats().heap_used_bytes <= HEAP_BLOCKS * BLOCK_BYTES
        assert all_same(answers(here, ours, schema), answers(there, theirs, schema))
        check(there)


@every_config
@pytest.mark.parametrize("pool_blocks", [0, 1, 40])
def test_the_pool_changes_no_answer(tmp_path, schema, config, pool_blocks):
    here, there, ours, theirs = pair(tmp_path, schema, config, pool_bytes=pool_blocks * BLOCK_BYTES)
    with here, there:
        for _ in range(2):
            assert all_same(answers(here, ours, schema), answers(there, theirs, schema))
        assert len(there._spill_pool.frames) <= pool_blocks
        check(there)


@pytest.mark.parametrize("policy", ["lru", "lfu", "clock", "score-decay", "arc"])
def test_every_policy_serves_a_decode(tmp_path, policy):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config(), pool_policy=policy, pool_bytes=20 * BLOCK_BYTES)
    with here, there:
        for i in range(12):
            rows = make_rows(SCHEMA, 1, 50 + i)
            append(ours, rows)
            append(theirs, rows)
            for layer in range(SCHEMA.n_layers):
                assert same_bits(ours.attend(layer, make_query(SCHEMA, i)), theirs.attend(layer, make_query(SCHEMA, i)))
            check(there)
        assert there._spill_pool.frames.stats().counters.hits > 0


@every_config
def test_rows_are_read_back_bit_for_bit(tmp_path, schema, config):
    here, there, ours, theirs = pair(tmp_path, schema, config)
    with here, there:
        ids = torch.randperm(N_ROWS, generator=torch.Generator().manual_seed(0))[:200]
        for layer in range(schema.n_layers):
            assert all_same(ours.read(layer), theirs.read(layer))
            assert all_same(ours.read(layer, 37, 411), theirs.read(layer, 37, 411))
            assert all_same(ours.fetch(layer, 2, ids), theirs.fetch(layer, 2, ids))


def test_explain_measures_the_same_mass(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config())
    with here, there:
        q = make_query(SCHEMA, 4)
        mine, other = (seq.explain(1, q, analyze=True).measured for seq in (ours, theirs))
        assert (mine.mass, mine.middle_mass, mine.chosen.tolist()) == (
            other.mass, other.middle_mass, other.chosen.tolist(),
        )  # fmt: skip


def test_a_batch_of_sequences_partly_on_disk_equals_single_runs(tmp_path):
    for config in (pq_config(), flat_config(budget=None)):
        folder = tmp_path / str(config.budget)
        with KVStore(SCHEMA, config) as here, KVStore.open(folder, SCHEMA, limited(config)) as there:
            ours, theirs = [], []
            for i, n in enumerate((700, 90, 500)):
                rows = make_rows(SCHEMA, n, 10 + i)
                for store, found in ((here, ours), (there, theirs)):
                    found.append(store.create(str(i)))
                    grow(found[-1], rows)
            q = torch.stack([make_query(SCHEMA, i) for i in range(3)])
            singles = torch.stack([seq.attend(1, q[i]) for i, seq in enumerate(ours)])
            assert same_bits(there.attend(1, theirs, q), singles)
            check(there)


# ---- changes ----


@every_config
def test_truncate_append_and_reindex_go_on(tmp_path, schema, config):
    here, there, ours, theirs = pair(tmp_path, schema, config)
    with here, there:
        for n, seed in ((700, 5), (333, 6), (5, 7)):
            for seq in (ours, theirs):
                seq.truncate(n)
                grow(seq, make_rows(schema, 200, seed))
            check(there)
            assert all_same(answers(here, ours, schema), answers(there, theirs, schema))
        for seq in (ours, theirs):
            grow(seq, make_rows(schema, 600, 8))
            seq.reindex()
        assert on_disk(theirs) > 0
        assert all_same(answers(here, ours, schema), answers(there, theirs, schema))
        check(there)


@every_config
def test_a_fork_shares_what_is_on_the_disk_and_outlives_its_parent(tmp_path, schema, config):
    here, there, ours, theirs = pair(tmp_path, schema, config)
    with here, there:
        twins = [seq.fork("what-if", 900) for seq in (ours, theirs)]
        assert on_disk(twins[1]) > 0
        for seq in (ours, theirs):
            seq.truncate(10)
        there.flush()
        check(there)
        assert all_same(answers(here, twins[0], schema), answers(there, twins[1], schema))
        here.drop("book")
        there.drop("book")
        for twin in twins:
            grow(twin, make_rows(schema, 150, 9))
        check(there)
        assert all_same(answers(here, twins[0], schema), answers(there, twins[1], schema))
        there.drop("what-if")
        there.flush()
        assert there.heap.used_blocks == 0
        assert there.check() == []
        assert there._persistence._archive.orphans() == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_fork_that_was_never_saved_keeps_its_rows_when_the_parent_is_dropped(tmp_path, keep):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config())
    with here, there:
        twins = [seq.fork("beam", keep=keep) for seq in (ours, theirs)]
        here.drop("book")
        there.drop("book")
        there.flush()
        assert there.check() == []
        assert on_disk(twins[1]) > 0
        assert all_same(answers(here, twins[0], SCHEMA), answers(there, twins[1], SCHEMA))
        check(there)


def test_many_truncates_to_any_row_bring_back_what_is_cut(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config())
    with here, there:
        for n in (999, 897, 896, 895, 640, 513, 512, 130, 128, 127, 33, 32, 1, 0):
            for seq in (ours, theirs):
                seq.truncate(n)
            check(there)
            for layer in range(SCHEMA.n_layers):
                assert all_same(ours.read(layer), theirs.read(layer))


# ---- coming back ----


@every_config
def test_it_comes_back_as_far_as_the_heap_holds(tmp_path, schema, config):
    here, there, ours, _ = pair(tmp_path, schema, config)
    with here:
        there.close()
        plain = dataclasses.replace(limited(config), budget=config.budget)
        with KVStore.open(tmp_path / "s", schema, plain) as again:
            seq = again["book"]
            assert on_disk(seq) > 60
            assert all_same(answers(here, ours, schema), answers(again, seq, schema))
            for twin in (ours, seq):
                grow(twin, make_rows(schema, 100, 3))
            assert all_same(answers(here, ours, schema), answers(again, seq, schema))
            check(again)
        with KVStore.open(tmp_path / "s", schema, plain, readonly=True) as reader:
            assert on_disk(reader["book"]) > 60
            assert all_same(answers(here, ours, schema), answers(reader, reader["book"], schema))


def test_sequences_larger_than_the_heap_take_turns(tmp_path):
    config = pq_config()
    with KVStore(SCHEMA, config) as here, KVStore.open(tmp_path / "s", SCHEMA, limited(config)) as there:
        for i in range(3):
            for store in (here, there):
                grow(store.create(str(i)), make_rows(SCHEMA, 600, i))
        for turn in range(4):
            for name in ("0", "1", "2"):
                rows = make_rows(SCHEMA, 20, 100 + turn)
                for store in (here, there):
                    append(store[name], rows)
                assert all_same(answers(here, here[name], SCHEMA), answers(there, there[name], SCHEMA))
                check(there)
        assert there.stats().heap_used_bytes <= HEAP_BLOCKS * BLOCK_BYTES


def test_int8_on_the_disk_keeps_rows_close(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config(), encoding="int8")
    with here, there:
        assert on_disk(theirs) > 60
        keys, wanted = theirs.read(0)[0], ours.read(0)[0]
        assert (keys - wanted).abs().max() < wanted.abs().max() / 127
        assert not same_bits(keys, wanted)


# ---- what does not fit ----


def test_one_step_larger_than_the_heap_is_refused_and_changes_nothing(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config(), n=500)
    with here, there:
        with pytest.raises(HeapFullError, match="heap_bytes"):
            fill(theirs, 800)
        assert (len(theirs), theirs.step_open) == (500, False)
        assert all_same(answers(here, ours, SCHEMA), answers(there, theirs, SCHEMA))
        check(there)


def test_a_sequence_that_is_not_kept_has_no_place_but_the_heap(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, limited(pq_config())) as store:
        seq = store.create("scratch", keep=False)
        with pytest.raises(HeapFullError):
            grow(seq, make_rows(SCHEMA, N_ROWS, 0))
        assert on_disk(seq) == 0
        check(store)


def test_work_in_the_background_is_given_up_when_its_rows_move(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config(), n=400)
    with here, there:
        theirs.reindex(background=True)
        for seq in (ours, theirs):
            grow(seq, make_rows(SCHEMA, 500, 2))
        there.wait()
        there._check()
        assert all_same([x for layer in (0, 1) for x in ours.read(layer)],
                        [x for layer in (0, 1) for x in theirs.read(layer)])  # fmt: skip
        exact = [store.topk(1, 0, make_query(SCHEMA, 1)[0], 9, sequence=seq, exact=True).positions.tolist()
                 for store, seq in ((here, ours), (there, theirs))]  # fmt: skip
        assert exact[0] == exact[1]


def test_damage_below_a_sequence_in_use_is_an_error_and_repair_keeps_the_rows_before_it(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config())
    with here, there:
        ref = theirs._tables[1].extent(20)
        key = there._persistence._directory.rows.read(there._persistence._directory.tier, 1, ref).key
        there._persistence._directory.tier.delete_many([key])
        with pytest.raises(Exception, match="not in the spill"):
            theirs.read(1)
        assert {finding.kind for finding in there.check(repair=True)} == {"rows"}
        assert len(theirs) == ref.number * SCHEMA.block_tokens
        assert there.check() == []
        for layer in range(SCHEMA.n_layers):
            assert all_same(ours.read(layer, 0, len(theirs)), theirs.read(layer))
        check(there)


def test_a_step_is_rolled_back_beside_blocks_on_the_disk(tmp_path):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config())
    with here, there:
        rows = make_rows(SCHEMA, 40, 3)
        theirs.begin_step()
        theirs.append(0, *rows[0])
        theirs.abort_step()
        assert np.array_equal(ours.positions(), theirs.positions())
        assert all_same(answers(here, ours, SCHEMA), answers(there, theirs, SCHEMA))
        check(there)


@pytest.mark.parametrize("ask", ["attend", "topk", "exact", "read", "truncate", "dense"])
def test_the_nth_read_that_fails_is_heard_and_the_next_one_is_right(tmp_path, monkeypatch, ask):
    here, there, ours, theirs = pair(tmp_path, SCHEMA, pq_config(), pool_bytes=20 * BLOCK_BYTES)
    calls = {
        "attend": lambda seq: [seq.attend(0, make_query(SCHEMA, 1))],
        "topk": lambda seq: [seq.topk(0, 1, make_query(SCHEMA, 1)[2:4], 40).scores],
        "exact": lambda seq: [seq.topk(0, 1, make_query(SCHEMA, 1)[2], 9, exact=True).scores],
        "read": lambda seq: seq.read(1),
        "truncate": lambda seq: seq.truncate(700) or seq.read(0, 600),
        "dense": lambda seq: [seq.attend(0, make_query(SCHEMA, 1), budget=None)],
    }
    reader, read = there._spill_pool.reader, there._spill_pool.reader._rows.read
    failed, n = 0, 1
    with here, there:
        while True:
            left = [n]

            def failing(*args, left=left):
                left[0] -= 1
                if left[0] == 0:
                    raise StorageError("made to fail")
                return read(*args)

            monkeypatch.setattr(reader._rows, "read", failing)
            try:
                found = calls[ask](theirs)
                break
            except StorageError:
                failed, n = failed + 1, n + 1
                check(there)
        monkeypatch.undo()
        assert failed > 0
        assert all_same(calls[ask](ours), found)
        check(there)


# ---- what it says of itself ----


def test_statistics_and_explain_say_where_blocks_are(tmp_path):
    _, there, _, theirs = pair(tmp_path, SCHEMA, pq_config(), pool_bytes=20 * BLOCK_BYTES)
    with there:
        before = there.stats()
        assert before.disk_blocks == on_disk(theirs) == before.spills
        assert before.blocks + before.disk_blocks == sum(table.n_blocks for table in theirs._tables)
        assert (before.pool_bytes, before.read_extents) == (0, 0)
        for _ in range(3):
            theirs.attend(0, make_query(SCHEMA, 1))
        after = there.stats()
        assert after.read_bytes == after.read_extents * 8 * BLOCK_BYTES > 0
        assert 0 < after.pool_hits <= after.pool_lookups
        assert 0 < after.pool_blocks <= 20
        assert after.pool_bytes >= 20 * BLOCK_BYTES
        assert (after.pool_pins, after.damaged_records) == (0, 0)
        explained = theirs.explain(0, make_query(SCHEMA, 1))
        spilled = theirs._tables[0].n_spilled
        assert explained.as_dict()["blocks"] == {"heap": 63 - spilled, "disk": spilled}
        assert f"{spilled} on the disk only" in str(explained)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_of_as_many_rows_as_there_is_room_for_is_taken(tmp_path, steps):
    with KVStore.open(tmp_path / "s", SCHEMA, limited(pq_config())) as store:
        seq = store.create("book")
        for i in range(steps):
            n = store.room([seq]).step_rows
            assert 0 < n < HEAP_BLOCKS // 2 * SCHEMA.block_tokens + 1
            fill(seq, n, seed=i)
            check(store)


def test_room_counts_the_disk_and_a_store_in_memory_its_heap_only(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, limited(pq_config())) as store:
        rows = store.room().rows
        assert rows == pytest.approx(0.95 * 64 * MIB / (2 * BLOCK_BYTES) * 16, rel=0.02)
        grow(store.create("book"), make_rows(SCHEMA, 500, 1))
        store.flush()
        assert rows - 600 < store.room().rows < rows - 500
        store.create("scratch", keep=False)
        fill(store["scratch"], 100)
        assert store.room().step_rows < HEAP_BLOCKS // 2 * 16 - 100
    memory = KVStore(SCHEMA, dataclasses.replace(pq_config(), heap_bytes=HEAP_BLOCKS * BLOCK_BYTES))
    fill(memory.create("book"), 100)
    assert memory.room().rows == memory.room().step_rows == (HEAP_BLOCKS // 2 - 7) * 16
    assert (KVStore(SCHEMA).room().rows, KVStore(SCHEMA).room().step_rows) == (None, None)
