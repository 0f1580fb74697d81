"""Random walks through each tier, beside a model that is a dictionary; closed, opened and vacuumed on the way."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.errors import SpillFullError, StorageError
from kvstore.storage.key import key_prefix
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.memory_tier import MemoryTier
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.storage.builders import ALICE, BOB, opaque
from tests.storage.wrappers import CountingTier, FaultyTier

NUMBERS = st.integers(0, 15)
SIZES = st.sampled_from([0, 40, 1500, 2100, 5000, 30_000])
RECORDS = st.builds(
    lambda number, size, seed, who: opaque(number, size, seed=seed, sequence=who),
    NUMBERS,
    SIZES,
    st.integers(0, 99),
    st.sampled_from([ALICE, BOB]),
)
KEYS = RECORDS.map(lambda record: record.key)


class TierMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.tier = self.open()
        self.model = {}

    def open(self):
        return MemoryTier()

    def teardown(self):
        self.tier.close()
        self.place.cleanup()

    @rule(puts=st.lists(RECORDS, max_size=5), deletes=st.lists(KEYS, max_size=3))
    def write(self, puts, deletes):
        try:
            self.tier.write(puts, deletes)
        except StorageError:
            return
        for key in deletes:
            self.model.pop(key, None)
        self.model.update((record.key, record) for record in puts)

    @rule(keys=st.lists(KEYS, max_size=8))
    def get(self, keys):
        assert self.tier.get_many(keys) == [self.model.get(key) for key in keys]

    @rule(key=KEYS)
    def contains(self, key):
        assert self.tier.contains(key) == (key in self.model)

    @rule(who=st.sampled_from([b"", ALICE, BOB]))
    def iterate(self, who):
        prefix = key_prefix(4, who)
        assert list(self.tier.iterate(prefix)) == sorted(k for k in self.model if k.pack().startswith(prefix))

    @rule()
    def vacuum(self):
        self.tier.vacuum()

    @rule()
    def flush(self):
        self.tier.flush()

    @invariant()
    def adds_up(self):
        self.tier._check()
        assert self.tier.n_records == len(self.model)
        assert self.tier.n_bytes == sum(record.n_bytes for record in self.model.values())


class LmdbMachine(TierMachine):
    settings = SpillSettings(16 * MIB)

    def open(self):
        return LmdbTier(Path(self.place.name), self.settings)

    @rule()
    def open_again(self):
        self.tier.close()
        self.tier = self.open()

    @rule(keys=st.lists(KEYS, max_size=4))
    def read_only(self, keys):
        self.tier.close()
        with LmdbTier(Path(self.place.name), readonly=True) as reader:
            assert reader.get_many(keys) == [self.model.get(key) for key in keys]
        self.tier = self.open()


class FullMachine(LmdbMachine):
    """So little room that batches are refused; a refused one changes nothing."""

    settings = SpillSettings(1 * MIB)

    @rule(puts=st.lists(RECORDS, max_size=8), pad=st.integers(0, 40))
    def write_much(self, puts, pad):
        before = dict(self.model)
        self.write([*puts, *(opaque(100 + i, 30_000) for i in range(pad))], [])
        try:
            self.tier.flush()
        except SpillFullError:
            self.model = before

    def write(self, puts, deletes):
        before = dict(self.model)
        super().write(puts, deletes)
        try:
            self.tier.flush()
        except SpillFullError:
            self.model = before


class CountingMachine(TierMachine):
    def open(self):
        return CountingTier(FaultyTier(MemoryTier()))


@pytest.mark.parametrize("machine", [TierMachine, LmdbMachine, FullMachine, CountingMachine])
def test_a_tier_is_a_dictionary(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=25))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [LmdbMachine, FullMachine])
def test_a_tier_is_a_dictionary_for_long(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=60))
