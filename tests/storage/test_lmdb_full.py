"""A spill, or a disk, that is full: nothing is half written, and what was there stays."""

import subprocess

import lmdb
import pytest

from kvstore.errors import ConfigError, KVStoreError, ReadOnlyStoreError, SpillFullError, StorageError
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.storage.builders import noise, opaque

KIB = 1024


@pytest.fixture
def tier(tmp_path):
    tier = LmdbTier(tmp_path, SpillSettings(2 * MIB))
    yield tier
    tier.close()


def fill(tier, n_bytes=100 * KIB):
    """Put records one at a time until no more fit; return how many did."""
    for i in range(1000):
        tier.put_many([opaque(i, n_bytes)])
        try:
            tier.flush()
        except SpillFullError:
            return i
    raise AssertionError("never full")


def test_a_batch_that_does_not_fit_is_refused_whole_with_the_numbers(tier):
    n = fill(tier)
    assert n == tier.n_records
    before = tier.n_bytes
    tier.put_many(opaque(100 + i, 100 * KIB) for i in range(3))
    with pytest.raises(SpillFullError, match=r"307536 bytes do not fit: \d+ of \d+ bytes for .* vacuum"):
        tier.flush()
    tier._check()
    assert (tier.n_records, tier.n_bytes) == (n, before)
    assert tier.get_many(opaque(i).key for i in range(100, 103)) == [None] * 3
    assert tier.get_many(opaque(i).key for i in range(n)) == [opaque(i, 100 * KIB) for i in range(n)]


def test_the_error_may_also_come_with_the_next_batch_which_is_not_taken(tier):
    fill(tier)
    tier.put_many([opaque(500, 900 * KIB)])
    while tier.queued_bytes:
        pass
    with pytest.raises(SpillFullError):
        tier.put_many([opaque(501)])
    assert tier.get_many([opaque(501).key]) == [None]
    tier.put_many([opaque(501)])
    tier.flush()
    assert tier.contains(opaque(501).key)


def test_a_full_spill_can_be_deleted_from_and_filled_again(tier):
    for turn in range(20):
        n = fill(tier)
        assert n >= 14, turn
        tier.delete_many(list(tier.iterate()))
        tier.flush()
        tier._check()
        assert tier.n_records == 0


def test_a_full_spill_can_be_written_over(tier):
    n = fill(tier)
    for turn in range(30):
        tier.put_many([opaque(turn % n, 100 * KIB, seed=turn)])
        tier.flush()
    tier._check()
    assert tier.n_records == n


def test_a_batch_that_makes_a_full_spill_smaller_is_taken(tier):
    n = fill(tier)
    tier.write(puts=[opaque(99, 10 * KIB)], deletes=[opaque(i).key for i in range(n - 2)])
    tier.flush()
    assert tier.n_records == 3


def test_a_map_that_is_full_before_the_limit_is_the_same_error(tmp_path, monkeypatch):
    """An old reader, or runs of free pages that are too short: LMDB says so itself."""
    monkeypatch.setattr(SpillSettings, "capacity_bytes", 1 << 40)
    with LmdbTier(tmp_path, SpillSettings(2 * MIB)) as tier:
        n = fill(tier, 300 * KIB)
        assert n == 6
        tier._check()
        tier.delete_many([opaque(0).key])
        tier.flush()
        assert tier.get_many(opaque(i).key for i in range(1, n)) == [opaque(i, 300 * KIB) for i in range(1, n)]
        tier.vacuum()
        tier.put_many([opaque(0, 300 * KIB)])
        tier.flush()
        tier._check()


def test_a_map_full_in_the_middle_of_a_batch_is_tried_again_once_and_whole(tmp_path, monkeypatch):
    points = []
    with LmdbTier(tmp_path, SpillSettings(2 * MIB), hook=points.append) as tier:
        real, calls = tier._file._write_once, []

        def full_once(*args):
            calls.append(args)
            if len(calls) == 1:
                raise lmdb.MapFullError("made up")
            return real(*args)

        monkeypatch.setattr(tier._file, "_write_once", full_once)
        tier.put_many([opaque(0), opaque(1)])
        tier.flush()
        assert len(calls) == 2
        assert points[-4:] == ["spill.put", "spill.put", "spill.before_commit", "spill.committed"]
        tier._check()


def test_a_spill_opened_with_less_room_keeps_what_it_has_and_refuses_more(tmp_path):
    with LmdbTier(tmp_path, SpillSettings(8 * MIB)) as tier:
        tier.put_many(opaque(i, 300 * KIB) for i in range(10))
    with LmdbTier(tmp_path, SpillSettings(1 * MIB)) as tier:
        assert tier.n_records == 10
        tier.put_many([opaque(50, 300 * KIB)])
        with pytest.raises(SpillFullError):
            tier.flush()
        tier._check()
    with LmdbTier(tmp_path, SpillSettings(8 * MIB)) as tier:
        tier.put_many([opaque(50, 300 * KIB)])
        tier.flush()
        assert tier.n_records == 11


def test_the_size_of_the_file_stays_bounded_when_sequences_come_and_go(tmp_path):
    with LmdbTier(tmp_path, SpillSettings(16 * MIB)) as tier:
        for i in range(300):
            tier.put_many(opaque(j, 60 * KIB, sequence=b"%016d" % i) for j in range(4))
            tier.delete_many(opaque(j, sequence=b"%016d" % i).key for j in range(4))
            tier.flush()
        tier._check()
        assert tier.file_bytes < 2 * MIB
        tier.vacuum()
        assert tier.file_bytes < 32 * KIB


def test_vacuum_gives_room_back_and_says_how_much(tmp_path):
    with LmdbTier(tmp_path, SpillSettings(16 * MIB)) as tier:
        tier.put_many(opaque(i, 300 * KIB) for i in range(30))
        tier.flush()
        tier.delete_many(opaque(i).key for i in range(29))
        tier.flush()
        before = tier.file_bytes
        given = tier.vacuum()
        assert given > 8 * MIB
        assert tier.file_bytes == before - given < MIB
        tier._check()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["spill-000002.mdb", "spill-000002.mdb-lock"]
    with LmdbTier(tmp_path, SpillSettings(16 * MIB)) as tier:
        assert tier.get_many([opaque(29).key]) == [opaque(29, 300 * KIB)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"spill_bytes": 1000}, "spill_bytes must be an integer of at least 1048576"),
        ({"spill_bytes": 1e9}, "spill_bytes"),
        ({"durability": "never"}, "process, power"),
        ({"when_full": "drop"}, "block, raise"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"max_readers": True}, "max_readers"),
    ],
)
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        SpillSettings(**{"spill_bytes": MIB, **settings})


def test_a_queue_that_is_full_raises_when_asked_to(tmp_path):
    settings = SpillSettings(8 * MIB, queue_bytes=200 * KIB, when_full="raise")
    with LmdbTier(tmp_path, settings) as tier:
        tier._gate._alone = True  # the writer cannot get in
        try:
            tier.put_many([opaque(0, 150 * KIB)])
            with pytest.raises(SpillFullError, match="bytes wait to be written"):
                tier.put_many([opaque(1, 150 * KIB)])
            assert tier.queued_bytes < 200 * KIB
        finally:
            with tier._gate._changed:
                tier._gate._alone = False
                tier._gate._changed.notify_all()
        tier._check()
        assert tier.n_records == 1


# ---- disks ----


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def test_a_full_disk_is_an_error_and_the_spill_goes_on(small_disk):
    with LmdbTier(small_disk, SpillSettings(64 * MIB)) as tier:
        tier.put_many(opaque(i, 300 * KIB) for i in range(5))
        tier.flush()
        tier.put_many(opaque(10 + i, 300 * KIB) for i in range(12))
        with pytest.raises(SpillFullError, match=r"368\d{4} bytes could not be written, the disk has \d+ free"):
            tier.flush()
        tier._check()
        assert tier.get_many(opaque(i).key for i in range(5)) == [opaque(i, 300 * KIB) for i in range(5)]
        assert tier.n_records == 5
        tier.delete_many([opaque(0).key])
        tier.put_many([opaque(20, 200 * KIB)])
        tier.flush()
        tier._check()
    with LmdbTier(small_disk, SpillSettings(64 * MIB)) as tier:
        assert tier.n_records == 5


def test_a_disk_without_room_for_a_copy_cannot_be_vacuumed_and_nothing_changes(small_disk):
    with LmdbTier(small_disk, SpillSettings(64 * MIB)) as tier:
        tier.put_many(opaque(i, 300 * KIB) for i in range(9))
        tier.flush()
        with pytest.raises(StorageError, match="spill-00000"):
            tier.vacuum()
        assert tier.get_many(opaque(i).key for i in range(9)) == [opaque(i, 300 * KIB) for i in range(9)]
        tier._check()
        assert not list(small_disk.glob("*.new"))


def test_a_disk_too_small_for_a_new_spill_is_an_error(small_disk):
    (small_disk / "ballast").write_bytes(noise((4 << 20) - 4096))
    with pytest.raises((StorageError, KVStoreError)):
        LmdbTier(small_disk, SpillSettings(MIB))
    (small_disk / "ballast").unlink()
    LmdbTier(small_disk, SpillSettings(MIB)).close()


def test_a_read_only_disk_is_an_error_of_its_own(small_disk):
    LmdbTier(small_disk, SpillSettings(MIB)).close()
    remount(small_disk, "ro")
    with pytest.raises((ReadOnlyStoreError, StorageError), match=r"rights|access|[Rr]ead-only"):
        LmdbTier(small_disk, SpillSettings(MIB))
    with pytest.raises(ReadOnlyStoreError):
        LmdbTier(small_disk / "new", SpillSettings(MIB))


def test_a_spill_on_a_read_only_disk_can_be_read(small_disk):
    with LmdbTier(small_disk, SpillSettings(MIB)) as tier:
        tier.put_many([opaque()])
    remount(small_disk, "ro")
    with LmdbTier(small_disk, readonly=True) as tier:
        assert tier.get_many([opaque().key]) == [opaque()]
