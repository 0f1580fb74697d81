"""What may lie where the spill's file should: each is an error, or the last state."""

import contextlib
import os
import threading
import time

import lmdb
import pytest

from kvstore.errors import (
    CorruptStoreError,
    ReadOnlyStoreError,
    StorageError,
    StoreLockedError,
    UnsupportedFormatError,
)
from kvstore.storage import lmdb_tier
from kvstore.storage.identity import IDENTITY
from kvstore.storage.key import KEY_BYTES
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.record import Record, encode_record
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.storage.builders import SETTINGS, noise, opaque
from tests.storage.processes import run_python

DATA, LOCK = "spill-000001.mdb", "spill-000001.mdb-lock"
WAYS = pytest.mark.parametrize("options", [{"settings": SETTINGS}, {"readonly": True}], ids=["writer", "reader"])


@pytest.fixture
def folder(tmp_path):
    """A spill with a few records, closed."""
    with LmdbTier(tmp_path / "spill", SETTINGS, store_id=b"s" * 16) as tier:
        tier.put_many(opaque(i, 3000) for i in range(5))
    return tmp_path / "spill"


def raw(path, **options):
    return lmdb.open(str(path), subdir=False, **options)


def test_what_was_written_is_there_when_it_is_opened_again(folder):
    for settings in (SETTINGS, SpillSettings(8 * MIB, "power")):
        with LmdbTier(folder, settings, store_id=b"s" * 16) as tier:
            assert tier.get_many(tier.iterate()) == [opaque(i, 3000) for i in range(5)]
            assert (tier.n_records, tier.n_bytes) == (5, 5 * 3080)
            assert tier.store_id == b"s" * 16
            tier._check()


@WAYS
def test_an_empty_file_is_refused_and_stays(folder, options):
    (folder / DATA).write_bytes(b"")
    with pytest.raises(CorruptStoreError, match="is empty, though never made so"):
        LmdbTier(folder, **options)
    assert (folder / DATA).stat().st_size == 0


@WAYS
@pytest.mark.parametrize("n_bytes", [1, 100, 4096, 40960])
def test_garbage_is_refused(folder, options, n_bytes):
    (folder / DATA).write_bytes(noise(n_bytes))
    with pytest.raises(CorruptStoreError, match="is no data file"):
        LmdbTier(folder, **options)


@WAYS
def test_a_folder_in_place_of_the_file_is_refused(folder, options):
    (folder / DATA).unlink()
    (folder / DATA).mkdir()
    with pytest.raises(CorruptStoreError, match="is not a file"):
        LmdbTier(folder, **options)


@WAYS
@pytest.mark.parametrize("name", [DATA, LOCK])
def test_links_are_not_followed(folder, options, name):
    target = folder.parent / "elsewhere"
    (folder / name).rename(target)
    before = target.read_bytes()
    (folder / name).symlink_to(target)
    with pytest.raises(CorruptStoreError, match="is a link; a store follows none"):
        LmdbTier(folder, **options)
    assert target.read_bytes() == before


def test_a_link_where_a_new_file_is_made_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"precious")
    for name in (DATA + ".new", DATA + ".new-lock", "spill-000002.mdb.new", "spill-000002.mdb-lock"):
        (tmp_path / name).symlink_to("elsewhere")
    with LmdbTier(tmp_path, SETTINGS) as tier:
        tier.put_many([opaque()])
        tier.vacuum()
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_garbage_for_a_lock_file_does_no_harm(folder):
    for data in (b"", b"x", noise(8192), bytes(8192)):
        (folder / LOCK).write_bytes(data)
        with LmdbTier(folder, SETTINGS) as tier:
            assert tier.n_records == 5
    (folder / LOCK).unlink()
    with LmdbTier(folder, readonly=True) as tier:
        assert tier.n_records == 5


@WAYS
def test_a_database_of_somebody_else_is_refused(tmp_path, options):
    with raw(tmp_path / DATA) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    with pytest.raises(UnsupportedFormatError, match="was not written by kvstore"):
        LmdbTier(tmp_path, **options)


@WAYS
def test_a_newer_spill_is_refused(tmp_path, options):
    with raw(tmp_path / DATA) as env, env.begin(write=True) as txn:
        txn.put(IDENTITY.pack(), encode_record(Record(IDENTITY, b"kvstore spill 2")))
    with pytest.raises(UnsupportedFormatError, match="a newer version wrote it"):
        LmdbTier(tmp_path, **options)


@WAYS
def test_a_file_of_a_newer_lmdb_is_refused(folder, options):
    """Format 3 (LMDB 1.0) where the engine writes 1: the version lies 4 bytes after the magic number of both metas."""
    with open(folder / DATA, "r+b") as file:
        for page in (0, 4096):
            file.seek(page + 16 + 4)
            file.write((3).to_bytes(4, "little"))
    with pytest.raises(CorruptStoreError, match="data version 3, this engine expects 1"):
        LmdbTier(folder, **options)


def test_a_spill_of_another_store_is_refused(folder):
    for options in ({"settings": SETTINGS}, {"readonly": True}):
        with pytest.raises(CorruptStoreError, match=f"belongs to store {(b's' * 16).hex()}, not to {bytes(16).hex()}"):
            LmdbTier(folder, store_id=bytes(16), **options)
    LmdbTier(folder, SETTINGS, store_id=b"s" * 16).close()


def test_a_key_that_is_none_is_found(folder):
    with raw(folder / DATA, map_size=8 * MIB) as env, env.begin(write=True) as txn:
        txn.put(b"x" * (KEY_BYTES - 1), b"value")
    with LmdbTier(folder, SETTINGS) as tier, pytest.raises(CorruptStoreError, match="a key of 31 bytes"):
        list(tier.iterate())


def test_leftovers_of_interrupted_work_are_removed_by_a_writer_only(folder):
    names = ["spill-000002.mdb.new", "spill-000002.mdb.new-lock", "spill-000000.mdb", "spill-000000.mdb-lock"]
    for name in (*names, "notes.txt", "spill-1.mdb"):
        (folder / name).write_bytes(b"x")
    with LmdbTier(folder, readonly=True) as tier:
        assert tier.n_records == 5
    assert set(names) <= set(os.listdir(folder))
    with LmdbTier(folder, SETTINGS) as tier:
        assert tier.n_records == 5
    assert sorted(os.listdir(folder)) == ["notes.txt", "spill-000001.mdb", "spill-000001.mdb-lock", "spill-1.mdb"]


def test_opening_twice_in_a_process_is_refused(folder):
    with LmdbTier(folder, SETTINGS) as tier:
        for options in ({"settings": SETTINGS}, {"readonly": True}):
            with pytest.raises(StoreLockedError, match="open in this process already"):
                LmdbTier(folder, live=True, **options)
        assert tier.n_records == 5


def test_nothing_can_be_written_to_a_spill_opened_to_be_read(folder):
    with LmdbTier(folder, readonly=True) as tier:
        for call in (lambda: tier.put_many([opaque()]), lambda: tier.delete_many([opaque().key]), tier.vacuum):
            with pytest.raises(ReadOnlyStoreError, match="opened to be read"):
                call()
        tier.flush()
        tier.sync()
        tier._check()
        assert (tier.n_records, tier.n_bytes, tier.written) == (5, 5 * 3080, 0)


def test_a_reader_whose_file_is_replaced_while_it_opens_it_takes_the_next(folder, monkeypatch):
    real, left = lmdb_tier.find_data, iter([True, True, False])

    def find_late(place):
        return place / "spill-000000.mdb" if next(left) else real(place)

    with monkeypatch.context() as patch:
        patch.setattr(lmdb_tier, "find_data", find_late)
        with LmdbTier(folder, readonly=True) as tier:
            assert tier.n_records == 5
        left = iter([True] * 3)
        with pytest.raises(StorageError, match="replaced 3 times in a row"):
            LmdbTier(folder, readonly=True)


def test_a_spill_that_is_not_there_cannot_be_read(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StorageError, match="holds no spill"):
            LmdbTier(folder, readonly=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("call", ["rename", "fsync", "unlink"])
def test_each_call_that_fails_while_vacuuming_leaves_every_record(tmp_path, monkeypatch, call):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        tier.put_many(opaque(i) for i in range(9))
        real, n = getattr(os, call), 0
        while True:
            n += 1
            tier.delete_many([opaque(100 + n).key])
            tier.flush()
            left = iter(range(1, 100))

            def failing(*args, left=left, n=n, **kwargs):
                if next(left) == n:
                    raise OSError(5, "made to fail")
                return real(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing)
                with contextlib.suppress(StorageError):
                    tier.vacuum()
                reached = next(left) > n
            assert tier.get_many(tier.iterate()) == [opaque(i) for i in range(9)]
            tier.put_many([opaque(0)])
            tier._check()
            if not reached:
                break
        assert 1 < n < 20
    with LmdbTier(tmp_path, SETTINGS) as tier:
        assert tier.get_many(tier.iterate()) == [opaque(i) for i in range(9)]


def test_opening_takes_no_memory_for_records(folder):
    """Accounting is a recount of keys and lengths: the records themselves are not read."""
    code = """
import sys, tracemalloc
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.record import Record
from kvstore.storage.spill_settings import SpillSettings
with LmdbTier(sys.argv[1], SpillSettings(64 << 20)) as tier:
    tier.put_many(Record(RecordKey(Kind.TOKENS, bytes(16), 0, 0, i), bytes(1 << 20)) for i in range(40))
tracemalloc.start()
with LmdbTier(sys.argv[1], SpillSettings(64 << 20)) as tier:
    assert tier.n_bytes > 40 << 20
print(tracemalloc.get_traced_memory()[1])
"""
    assert int(run_python(code, folder)) < 4 << 20


@pytest.mark.parametrize("call", ["rename", "fsync", "mkdir"])
def test_each_call_that_fails_while_a_spill_is_made_leaves_none_or_a_sound_one(tmp_path, monkeypatch, call):
    real, n = getattr(os, call), 0
    while True:
        n += 1
        folder, left = tmp_path / str(n), iter(range(1, 100))

        def failing(*args, left=left, n=n, **kwargs):
            if next(left) == n:
                raise OSError(28, "made to fail")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with contextlib.suppress(StorageError):
                LmdbTier(folder, SETTINGS).close()
            reached = next(left) > n
        with LmdbTier(folder, SETTINGS) as tier:
            tier.put_many([opaque()])
            tier._check()
        assert sorted(os.listdir(folder)) == [DATA, LOCK]
        if not reached:
            break
    assert 1 < n < 20


def test_memory_that_runs_out_within_a_batch_keeps_nothing_of_it(tmp_path, monkeypatch):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        tier.put_many([opaque(0, seed=7)])
        left = iter([False, False, True])

        def fail_third(record, buffers=None):
            if next(left):
                raise MemoryError("made to fail")
            return encode_record(record, buffers)

        with monkeypatch.context() as patch:
            patch.setattr(lmdb_tier, "encode_record", fail_third)
            with pytest.raises(MemoryError):
                tier.put_many(opaque(i) for i in range(4))
        assert tier.get_many(opaque(i).key for i in range(4)) == [opaque(0, seed=7), None, None, None]
        tier._check()


def test_a_slow_disk_and_a_small_queue_only_take_longer(tmp_path):
    def slow(point):
        if point == "spill.before_commit":
            time.sleep(0.002)

    settings = SpillSettings(8 * MIB, queue_bytes=10_000, commit_bytes=5000)
    with LmdbTier(tmp_path, settings, hook=slow) as tier:

        def work(first):
            for i in range(first, first + 20):
                tier.put_many([opaque(i, 3000)])
                assert tier.get_many([opaque(i).key]) == [opaque(i, 3000)]

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        tier._check()
        assert tier.n_records == 60
