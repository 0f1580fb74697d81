"""Statistics that a store leaves in its directory."""

import json
import os

import pytest

from kvstore import CorruptStoreError, KVStore, StorageError
from kvstore.stats_file import MAX_STATS_BYTES, STATS_NAME, SavedStats, read_stats, write_stats
from tests.builders import SCHEMA, fill, make_query
from tests.kvstore.test_durable import small


@pytest.fixture
def store(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 300)
        yield store


@pytest.fixture
def path(store):
    return store._persistence._directory.path


@pytest.mark.parametrize("write", ["flush", "checkpoint", "close"])
def test_a_writer_leaves_its_statistics(store, path, write):
    assert read_stats(path) is None
    store["book"].attend(0, make_query(SCHEMA, 1))
    store.flush()
    stats = store.stats()
    getattr(store, write)()
    saved = read_stats(path)
    assert saved.pid == os.getpid()
    assert saved.age_s >= 0
    assert saved.stats.as_dict() == stats.as_dict() | {"disk_bytes": saved.stats.disk_bytes}
    assert (saved.stats.rows, saved.stats.counters.attends["index"]) == (300, 1)
    assert saved.stats.disk_bytes > 0


def test_the_file_holds_plain_numbers(store, path):
    store.flush()
    plain = json.loads((path / STATS_NAME).read_text())
    assert plain == read_stats(path).as_dict()
    assert plain["stats"]["counters"]["steps"] == 1
    assert len((path / STATS_NAME).read_bytes()) < MAX_STATS_BYTES / 8


def test_who_only_reads_writes_none(store, path):
    store.close()
    (path / STATS_NAME).unlink()
    with KVStore.open(path, readonly=True) as reader:
        assert len(reader["book"]) == 300
        reader.flush()
    assert not (path / STATS_NAME).exists()


def test_a_store_opens_whatever_lies_there(store, path):
    store.close()
    (path / STATS_NAME).write_bytes(b"\x00")
    (path / (STATS_NAME + ".abc.part")).write_bytes(b"{")
    with KVStore.open(path) as again:
        assert len(again["book"]) == 300
    assert read_stats(path).stats.rows == 300
    assert not list(path.glob("*.part"))


def test_a_file_that_cannot_be_written_is_an_error_like_any_other(store, path):
    (path / STATS_NAME).mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        store.flush()
    (path / STATS_NAME).rmdir()
    store.flush()
    assert read_stats(path).stats.rows == 300


DAMAGE = {
    "empty": lambda plain: b"",
    "no text": lambda plain: b"\xff\xfe",
    "torn": lambda plain: json.dumps(plain).encode()[:-9],
    "a list": lambda plain: b"[]",
    "deep": lambda plain: b"[" * 60_000,
    "nothing in it": lambda plain: b"{}",
    "text for a number": lambda plain: json.dumps({**plain, "pid": "1"}).encode(),
    "a huge number": lambda plain: json.dumps({**plain, "unix_time_s": 10**400}).encode(),
    "below 0": lambda plain: json.dumps({**plain, "pid": -1}).encode(),
    "no number": lambda plain: json.dumps({**plain, "unix_time_s": float("nan")}).encode(),
    "a field is missing": lambda plain: json.dumps(without(plain, "rows")).encode(),
    "plans are a list": lambda plain: json.dumps(with_attends(plain, [1])).encode(),
    "too long": lambda plain: b" " * (MAX_STATS_BYTES + 1),
}


def without(plain, name):
    return {**plain, "stats": {key: value for key, value in plain["stats"].items() if key != name}}


def with_attends(plain, attends):
    stats = plain["stats"]
    return {**plain, "stats": {**stats, "counters": {**stats["counters"], "attends": attends}}}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_damage_is_one_error(store, path, damage):
    store.flush()
    plain = json.loads((path / STATS_NAME).read_text())
    (path / STATS_NAME).write_bytes(damage(plain))
    with pytest.raises(CorruptStoreError, match=r"stats\.json"):
        read_stats(path)


def test_links_are_not_followed(store, path, tmp_path):
    store.flush()
    (path / STATS_NAME).rename(tmp_path / "elsewhere")
    (path / STATS_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptStoreError, match="is a link"):
        read_stats(path)


def test_what_a_newer_version_has_added_does_no_harm(store, path):
    store.flush()
    plain = json.loads((path / STATS_NAME).read_text())
    newer = {**plain, "host": "here", "stats": {**plain["stats"], "frames": 7}}
    (path / STATS_NAME).write_text(json.dumps(newer))
    assert read_stats(path).as_dict() == plain


def test_a_clock_that_was_set_back_gives_an_age_of_0(store, path):
    write_stats(path, store.stats())
    saved = read_stats(path)
    assert SavedStats(saved.stats, saved.unix_time_s + 1e6, saved.pid).age_s == 0
