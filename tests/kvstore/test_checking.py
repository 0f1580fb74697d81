"""Checking and mending a store in a directory."""

import shutil

import pytest

from kvstore import CorruptStoreError, KVStore, ReadOnlyStoreError
from kvstore.row_records import row_key
from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.record import Record
from tests.builders import SCHEMA, append, fill, make_query, make_rows, same_bits
from tests.kvstore.test_durable import small

N = 9000  # several extents a layer


@pytest.fixture
def made(tmp_path):
    """A directory with two sequences, one of them long."""
    rows = make_rows(SCHEMA, N, 1)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        append(store.create("book"), rows)
        fill(store.create("note"), 30, seed=2)
    return tmp_path / "s", rows


def tier_of(store):
    return store._persistence._directory.tier


def entry_of(store, name="book"):
    return store._persistence._archive.entries[name]


def kinds(findings):
    return sorted({finding.kind for finding in findings})


def test_a_sound_store_has_no_findings(made):
    with KVStore.open(made[0], config=small()) as store:
        assert store.check() == []
        assert store.check(repair=True) == []
        fill(store["book"], 10)
        assert store.check() == []
    memory = KVStore(SCHEMA, small())
    fill(memory.create("x"), 100)
    assert memory.check() == memory.check(repair=True) == []


def test_what_no_sequence_names_is_found_and_deleted(made):
    with KVStore.open(made[0], config=small()) as store:
        tier_of(store).put_many([Record(RecordKey(Kind.INDEX, bytes(16), 999, 0, 0), b"left behind")])
        (finding,) = store.check()
        assert (finding.kind, finding.sequence) == ("orphan", "")
        n = tier_of(store).n_records
        assert store.check(repair=True) == [finding]
        assert tier_of(store).n_records == n - 1
        assert store.check() == []


def test_lost_rows_are_found_and_the_rows_before_them_kept(made):
    path, rows = made
    with KVStore.open(path, config=small()) as store:
        lost = entry_of(store).layers[0][1]
        tier_of(store).delete_many([row_key(lost, 1)])
        first = lost.number * SCHEMA.block_tokens
        findings = store.check()
        assert kinds(findings) == ["rows"]
        assert "not in the spill" in findings[0].text
        assert findings[0].sequence == "book"
        with pytest.raises(CorruptStoreError):
            store["book"]
        assert "note" in store
        assert len(store["note"]) == 30
        assert kinds(store.check(repair=True)) == ["rows"]
        assert store.check() == []
        assert len(store["book"]) == first
    with KVStore.open(path, config=small()) as store:
        seq = store["book"]
        for layer in range(SCHEMA.n_layers):
            assert same_bits(seq.read(layer)[0], rows[layer][0][:, :first])
        assert seq.attend(0, make_query(SCHEMA, 1)).isfinite().all()
        assert seq.positions().tolist() == list(range(first))


def test_what_is_in_memory_is_written_again(made):
    path, rows = made
    with KVStore.open(path, config=small()) as store:
        seq = store["book"]
        tier_of(store).delete_many([row_key(entry_of(store).layers[0][0], 0)])
        assert kinds(store.check(repair=True)) == ["rows"]
        assert len(seq) == N
        assert store.check() == []
    with KVStore.open(path, config=small()) as store:
        assert same_bits(store["book"].read(0)[0], rows[0][0])


def test_a_lost_index_is_found_and_built_again(made):
    path, _ = made
    with KVStore.open(path, config=small()) as store:
        ref = entry_of(store).indexes[0]
        tier_of(store).delete_many([RecordKey(Kind.INDEX, ref.sequence, ref.generation, 0, 0)])
        assert kinds(store.check()) == ["index"]
        assert store["book"]._indexes[0].index.n_rows == N - 10
        store.drop("note")
        assert kinds(store.check(repair=True)) in (["index"], [])
        assert store.check() == []


def test_a_reader_finds_but_does_not_mend(made, tmp_path):
    with KVStore.open(made[0], config=small(), readonly=True) as store:
        assert store.check() == []
        with pytest.raises(ReadOnlyStoreError):
            store.check(repair=True)


def test_a_damaged_entry_is_refused_and_given_up_only_by_repair(made):
    path, _ = made
    with KVStore.open(path, config=small()) as store:
        entry, tier = entry_of(store), tier_of(store)
        key = RecordKey(Kind.CATALOG, entry.sequence, entry.generation)
        tier.put_many([Record(key, b"no entry")])
        tier.flush()
        image = path.parent / "image"
        shutil.copytree(path, image)
    with pytest.raises(CorruptStoreError, match="repair"):
        KVStore.open(image, config=small())
    for _ in range(2):  # opening alone deletes nothing
        with KVStore.open(image, config=small(), salvage=True) as store:
            assert list(store) == ["note"]
            assert kinds(store.check()) == ["catalog"]
            assert len(store["note"]) == 30
    with KVStore.open(image, config=small(), salvage=True) as store:
        assert set(kinds(store.check(repair=True))) == {"catalog", "orphan"}
        assert store.check() == []
    with KVStore.open(image, config=small()) as store:
        assert list(store) == ["note"]
