"""More sequences than memory: the idle ones wait on disk."""

import gc

import pytest
import torch

from kvstore import ConfigError, HeapFullError, KVStore, SequenceNotFoundError, SpillFullError, StepError
from tests.builders import SCHEMA, append, cut, fill, make_query, make_rows, same_bits
from tests.kvstore.test_durable import small

ROW_BYTES = SCHEMA.n_layers * SCHEMA.block_bytes // SCHEMA.block_tokens


def tight(n_rows, **changes):
    """Memory for so many rows."""
    return small(heap_bytes=n_rows * ROW_BYTES, arena_bytes=4 * SCHEMA.block_bytes, **changes)


def test_many_interleaved_sequences_give_what_single_runs_give(tmp_path):
    """All of them together have ten times the rows that memory has room for."""
    names = [f"s{i}" for i in range(32)]
    rows = {name: make_rows(SCHEMA, 120, i) for i, name in enumerate(names)}
    alone = {}
    for name in names:
        seq = KVStore(SCHEMA, small()).create(name)
        alone[name] = []
        for low in range(0, 120, 30):
            append(seq, cut(rows[name], low, low + 30))
            alone[name] += [seq.attend(layer, make_query(SCHEMA, low)) for layer in range(SCHEMA.n_layers)]
    with KVStore.open(tmp_path / "s", SCHEMA, tight(400)) as store:
        together = {name: [] for name in names}
        sequences = {name: store.create(name) for name in names}
        for low in range(0, 120, 30):
            for name, seq in sequences.items():
                append(seq, cut(rows[name], low, low + 30))
                together[name] += [seq.attend(layer, make_query(SCHEMA, low)) for layer in range(SCHEMA.n_layers)]
                assert store.heap.reserved_bytes <= store.config.heap_bytes
        for name, seq in sequences.items():
            assert store[name] is seq
            assert all(same_bits(a, b) for a, b in zip(together[name], alone[name], strict=True))
            for layer in range(SCHEMA.n_layers):
                for stored, given in zip(seq.read(layer), rows[name][layer], strict=True):
                    assert same_bits(stored, given)
        store._check()
        assert store.stats().unloads > 100
        assert store.check() == []


def test_what_was_used_longest_ago_goes_first(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, tight(340)) as store:
        a, b, c = (store.create(name) for name in "abc")
        for seq in (a, b, c):
            fill(seq, 100)
        a.attend(0, make_query(SCHEMA, 1))
        fill(store.create("d"), 100)
        assert sorted(store._sequences) == ["a", "c", "d"]
        assert len(b) == 100
        b.attend(0, make_query(SCHEMA, 1))
        assert sorted(store._sequences) == ["a", "b", "d"]
        assert sorted(store) == ["a", "b", "c", "d"]


def test_a_batch_keeps_all_of_its_sequences(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, tight(340)) as store:
        sequences = [store.create(name) for name in "abcde"]
        for i, seq in enumerate(sequences):
            fill(seq, 100, seed=i)
        q = torch.stack([make_query(SCHEMA, i) for i in range(3)])
        out = store.attend(1, sequences[:3], q)
        for i in range(3):
            assert same_bits(out[i], sequences[i].attend(1, q[i]))
        with pytest.raises(HeapFullError):
            store.attend(1, sequences, torch.stack([make_query(SCHEMA, i) for i in range(5)]))
        assert sequences[4].attend(1, q[0]).isfinite().all()


def test_an_open_step_stays_and_a_sequence_too_large_is_an_error(tmp_path):
    rows = make_rows(SCHEMA, 600, 1)
    with KVStore.open(tmp_path / "s", SCHEMA, tight(340)) as store:
        a, b = store.create("a"), store.create("b")
        append(b, cut(rows, 0, 200))
        a.begin_step()
        a.append(0, *cut(rows, 0, 250)[0])
        with pytest.raises(HeapFullError):
            b.attend(0, make_query(SCHEMA, 1)) if b._unloaded else fill(store.create("c"), 300)
        with pytest.raises(StepError):
            store.unload("a")
        a.abort_step()
        append(a, cut(rows, 0, 250))
        with pytest.raises(HeapFullError, match="or raise heap_bytes"):
            append(a, cut(rows, 250, 600))
        assert same_bits(a.read(0)[0], rows[0][0][:, :250])
        assert same_bits(b.read(1)[0], rows[1][0][:, :200])


def test_unloading_by_hand_and_handles(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        seq = store.create("book")
        rows = fill(seq, 300)
        seq.budget = lambda layer, head, n: 50
        before, used = seq.attend(0, make_query(SCHEMA, 1)), store.heap.used_blocks
        store.unload("book")
        store.unload("book")
        assert store.heap.used_blocks == 0
        assert used > 0
        seq._check()
        store._check()
        assert (len(seq), "book" in store, list(store)) == (300, True, ["book"])
        assert store["book"] is seq
        assert same_bits(seq.attend(0, make_query(SCHEMA, 1)), before)  # the rule of the budget too
        store.unload("book")
        seq.truncate(100)
        fill(seq, 5, seed=2)
        assert same_bits(seq.read(0, 0, 100)[0], rows[0][0][:, :100])
        store.unload("book")
        child = seq.fork("child")
        store.unload("book")
        store.drop("book")
        with pytest.raises(SequenceNotFoundError):
            seq.attend(0, make_query(SCHEMA, 1))
        assert len(child.read(0)[0][0]) == 105
        store.unload("child")
        del child
        gc.collect()
        assert len(store["child"]) == 105
        with pytest.raises(SequenceNotFoundError):
            store.unload("nobody")
    memory = KVStore(SCHEMA, small())
    memory.create("x")
    with pytest.raises(ConfigError, match=r"KVStore\.open"):
        memory.unload("x")


def test_a_reader_may_have_less_memory_than_the_writer_had(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        for i in range(5):
            fill(store.create(f"s{i}"), 100, seed=i)
    with KVStore.open(tmp_path / "s", config=tight(210), readonly=True) as store:
        for _ in range(2):
            for i in range(5):
                assert same_bits(store[f"s{i}"].read(0)[0], make_rows(SCHEMA, 100, i)[0][0])


def test_a_sequence_that_cannot_be_saved_stays_in_memory(tmp_path):
    config = tight(9000, flush_rows=0, spill_bytes=1 << 20)
    with pytest.raises(SpillFullError), KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        seq = store.create("book")
        rows = fill(seq, 6000)
        with pytest.raises(SpillFullError):
            fill(store.create("other"), 6000)
        assert same_bits(seq.read(0)[0], rows[0][0])
        assert len(store["other"]) == 0
        store._check()
