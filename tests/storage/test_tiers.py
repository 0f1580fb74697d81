"""Each tier, and each wrapper, keeps the contract."""

import lmdb
import pytest

from kvstore.errors import StorageError
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.memory_tier import MemoryTier
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.contracts.tier import TierContract
from tests.storage.builders import opaque
from tests.storage.wrappers import CountingTier, FaultyTier, SlowTier


def plant_in_memory(tier, key, data):
    tier._records[key.pack()] = data


class TestMemoryTier(TierContract):
    def make(self, folder):
        return MemoryTier()

    plant = staticmethod(plant_in_memory)


class TestLmdbTier(TierContract):
    settings = SpillSettings(16 * MIB)

    def make(self, folder):
        return LmdbTier(folder, self.settings)

    def plant(self, tier, key, data):
        tier.flush()
        with tier._file._env.begin(write=True) as txn:
            txn.put(key.pack(), data)
        tier._usage = tier._file.usage()


class TestLmdbTierThatSurvivesLossOfPower(TestLmdbTier):
    settings = SpillSettings(16 * MIB, durability="power", commit_bytes=1)


class TestLmdbTierWithHardlyAQueue(TestLmdbTier):
    settings = SpillSettings(16 * MIB, queue_bytes=1, commit_bytes=1)


class TestFaultyTier(TierContract):
    def make(self, folder):
        return FaultyTier(MemoryTier())

    def plant(self, tier, key, data):
        plant_in_memory(tier.inner, key, data)


class TestSlowTier(TestFaultyTier):
    def make(self, folder):
        return SlowTier(MemoryTier(), 0.0)


class TestCountingTier(TestFaultyTier):
    def make(self, folder):
        return CountingTier(MemoryTier())


def test_lmdb_is_the_one_whose_files_have_been_published_for_years():
    assert lmdb.version()[:2] == (0, 9)


def test_a_faulty_tier_fails_once_and_changes_nothing_then():
    for n in range(1, 10):
        tier = FaultyTier(MemoryTier(), n)
        failed = 0
        for i in range(3):
            try:
                tier.put_many([opaque(i)])
                assert tier.get_many([opaque(i).key]) == [opaque(i)]
                tier.flush()
            except StorageError:
                failed += 1
        assert failed == 1
        tier._check()
        assert tier.n_records == (2 if n % 3 == 1 else 3)


def test_a_counting_tier_counts():
    tier = CountingTier(MemoryTier())
    tier.put_many([opaque()])
    tier.get_many([opaque().key])
    tier.get_many([])
    assert tier.calls == {"write": 1, "get_many": 2}


def test_a_slow_tier_is_slow(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    SlowTier(MemoryTier(), 0.25).put_many([opaque()])
    assert slept == [0.25]


@pytest.mark.parametrize("readonly", [True, False])
def test_a_spill_is_opened_with_settings_or_to_be_read(tmp_path, readonly):
    with pytest.raises(ValueError, match="with settings to be written, or readonly and without"):
        LmdbTier(tmp_path, SpillSettings(MIB) if readonly else None, readonly=readonly)
