"""Dropping sequences by age and by budget."""

import json

import pytest

from kvstore import ConfigError, KVStore, ReadOnlyStoreError
from tests.builders import SCHEMA, fill, pq_config

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by 100 seconds a call of `tick`."""

    class Clock:
        now = 1000.0

        def tick(self, seconds=100.0):
            self.now += seconds

    clock = Clock()
    for module in ("sequence", "eviction", "last_used"):
        monkeypatch.setattr(f"kvstore.{module}.time.time", lambda: clock.now)
    return clock


def small():
    return pq_config(spill_bytes=64 * MIB)


def three(store, clock):
    """Sequences a, b, c, used in this order, 100 seconds apart."""
    for name in "abc":
        fill(store.create(name), 200)
        clock.tick()


def test_what_is_idle_for_long_enough_goes(tmp_path, clock):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        three(store, clock)
        assert store.evict(idle_s=250) == ["a"]
        store["b"].read(0)
        assert store.evict(idle_s=100) == ["c"]
        assert list(store) == ["b"]
        assert store.check() == []


def test_age_counts_over_processes(tmp_path, clock):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        three(store, clock)
    clock.tick(1000)
    with KVStore.open(tmp_path / "s") as store:
        assert len(store["a"]) == 200
        assert store.evict(idle_s=1150) == ["b"]
        assert sorted(store) == ["a", "c"]


def test_the_oldest_go_until_the_records_fit(tmp_path, clock):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        three(store, clock)
        store.flush()
        each = store.stats().disk_bytes // 3
        store["a"].read(0)
        assert store.evict(max_bytes=int(2.5 * each)) == ["b"]
        assert store.evict(max_bytes=int(2.5 * each)) == []
        assert store.stats().disk_bytes <= 2.5 * each
        assert sorted(store.evict(max_bytes=0)) == ["a", "c"]
        assert store.stats().disk_bytes == 0


def test_a_fork_keeps_what_it_shares(tmp_path, clock):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        seq = store.create("a")
        rows = fill(seq, 1500)
        clock.tick()
        seq.fork("b")
        clock.tick()
        store["b"].read(0, 0, 1)
        assert store.evict(idle_s=50) == ["a"]
        assert store["b"].read(0)[0].equal(rows[0][0])
        assert store.check() == []


def test_steps_and_scratch_stay(tmp_path, clock):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        three(store, clock)
        fill(store.create("scratch", keep=False), 10)
        store["a"].begin_step()
        clock.tick(1e6)
        assert sorted(store.evict(idle_s=0, max_bytes=0)) == ["b", "c"]
        store["a"].abort_step()


def test_a_store_in_memory_counts_its_heap(clock):
    store = KVStore(SCHEMA, pq_config())
    three(store, clock)
    each = store.stats().heap_used_bytes // 3
    assert store.evict(max_bytes=each) == ["a", "b"]
    assert list(store) == ["c"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": "x"}', '{"a": -1}', '{"a": 1e999}'])
def test_a_damaged_file_makes_everything_young(tmp_path, clock, damage):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        three(store, clock)
    (tmp_path / "s" / "last_used.json").write_text(damage)
    clock.tick(1e6)
    with KVStore.open(tmp_path / "s") as store:
        assert store.evict(idle_s=10) == []
        assert len(store) == 3
    assert set(json.loads((tmp_path / "s" / "last_used.json").read_text())) == {"a", "b", "c"}


@pytest.mark.parametrize("wrong", [{}, {"max_bytes": -1}, {"max_bytes": 1.5}, {"idle_s": -1}, {"idle_s": float("nan")}])
def test_a_wrong_call_drops_nothing(wrong):
    store = KVStore(SCHEMA, pq_config())
    fill(store.create("a"), 10)
    with pytest.raises(ConfigError):
        store.evict(**wrong)
    assert list(store) == ["a"]


def test_a_reader_evicts_nothing(tmp_path):
    KVStore.open(tmp_path / "s", SCHEMA, small()).close()
    with KVStore.open(tmp_path / "s", readonly=True) as store, pytest.raises(ReadOnlyStoreError):
        store.evict(idle_s=0)
    assert (tmp_path / "s").is_dir()
