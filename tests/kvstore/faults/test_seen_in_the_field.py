"""What has gone wrong in stores of other systems that put rows on disk and bring them back."""

import shutil

import pytest

from kvstore import CorruptStoreError, KVStore
from kvstore.row_records import row_key
from tests.builders import append, make_query, same_bits
from tests.kvstore.faults.workload import (
    ROW_BYTES,
    SCHEMA,
    assert_sound,
    found,
    perform,
    rows_of,
    run,
    small,
    tokens_of,
)
from tests.storage.processes import run_python


def rows_in(seq):
    """All rows of a sequence."""
    return [part for layer in range(SCHEMA.n_layers) for part in seq.read(layer)]


@pytest.mark.parametrize("encoding", ["raw", "fp16", "bf16", "int8"])
def test_rows_do_not_decay_from_turn_to_turn_as_they_go_to_the_disk_and_come_back(tmp_path, encoding):
    """A lossy encoding rounds a row once; the second turn must not read what was rounded again."""
    config, after_first = small(encoding=encoding), None
    for turn in range(5):
        with KVStore.open(tmp_path / "s", SCHEMA, config) as store:
            seq = store["a"] if turn else store.create("a")
            if after_first is not None:
                assert all(same_bits(now[:, :50], then) for now, then in zip(rows_in(seq), after_first, strict=True))
            append(seq, rows_of(run(50 * turn, 50)))
            store.unload("a")
            if after_first is None:
                after_first = rows_in(seq)
                for given, stored in zip([p for layer in rows_of(run(0, 50)) for p in layer], after_first, strict=True):
                    assert (given - stored).abs().max() <= (0 if encoding == "raw" else 0.05)
    assert len(list((tmp_path / "s").glob("spill-*.mdb"))) == 1


def test_a_sequence_is_not_taken_out_of_memory_for_its_own_new_rows(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small(heap_bytes=200 * ROW_BYTES)) as store:
        for i, name in enumerate("abc"):
            perform(store, ("step", name, 100 * i, 100))
        for turn in range(4):
            for i, name in enumerate("abc"):
                perform(store, ("step", name, 100 * i + 100 + 20 * turn, 20))
                assert name in store._sequences
        assert found(store) == {name: run(100 * i, 180) for i, name in enumerate("abc")}
        assert_sound(store)


def test_rows_that_were_never_flushed_are_on_disk_before_they_leave_memory(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small(heap_bytes=200 * ROW_BYTES, flush_rows=0)) as store:
        perform(store, ("step", "a", 0, 150))
        assert store._persistence.names == []
        perform(store, ("step", "b", 200, 150))
        assert list(store._sequences) == ["b"]
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    with KVStore.open(tmp_path / "killed", SCHEMA, small()) as store:
        assert found(store) == {"a": run(0, 150)}
        assert_sound(store)


def test_attention_over_all_rows_is_the_same_before_and_after_the_disk(tmp_path):
    queries = [make_query(SCHEMA, i) for i in range(5)]
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 300))
        before = [store["a"].attend(layer, q, budget=None) for layer in range(2) for q in queries]
        store.unload("a")
        after = [store["a"].attend(layer, q, budget=None) for layer in range(2) for q in queries]
        assert all(map(same_bits, before, after))


def test_a_sequence_that_waits_on_disk_says_how_many_rows_it_has_without_coming_back(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 70))
        seq = store["a"]
        store.unload("a")
        assert (len(seq), seq.n_rows(0), seq.n_rows(1)) == (70, 70, 70)
        assert list(store._sequences) == []


def test_a_restore_that_fails_poisons_neither_memory_nor_other_sequences(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        for i, name in enumerate("abc"):
            perform(store, ("step", name, 100 * i, 100))
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        lost = store._persistence._archive.entries["a"].layers[1][0]
        store._persistence._archive.tier.delete_many([row_key(lost, 1)])
        assert tokens_of(store["b"]) == run(100, 100)
        used = store.heap.used_blocks
        for _ in range(3):
            with pytest.raises(CorruptStoreError, match="not in the spill"):
                store["a"]
            assert store.heap.used_blocks == used
            store._check()
        assert tokens_of(store["c"]) == run(200, 100)
        store.drop("a")
        perform(store, ("step", "a", 300, 50))
        assert found(store) == {"a": run(300, 50), "b": run(100, 100), "c": run(200, 100)}
        assert_sound(store)


FIND = """
import sys
from kvstore import KVStore
from tests.kvstore.faults.workload import SCHEMA, run, small, tokens_of
with KVStore.open(sys.argv[1], SCHEMA, small()) as store:
    for name in "abc":
        first = 100 * "abc".index(name)
        match = store.match_prefix(run(first, 100))
        print(match.name, match.n_rows, tokens_of(store[match.name]) == run(first, 80))
"""


def test_prefixes_are_found_by_another_process_after_the_writer_was_killed(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        for i, name in enumerate("abc"):
            perform(store, ("step", name, 100 * i, 80))
            store[name].note_tokens(run(100 * i, 80))
        store.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    assert run_python(FIND, tmp_path / "killed").split() == [w for name in "abc" for w in (name, "80", "True")]
