"""What every tier must do; a test class of a tier inherits it and says how to make one."""

from __future__ import annotations

import pickle
import random
import threading
from pathlib import Path

import pytest

from kvstore.errors import (
    ConfigError,
    CorruptBlockError,
    CorruptStoreError,
    ForkedStoreError,
    StoreClosedError,
    UnsupportedFormatError,
)
from kvstore.storage.key import Kind, RecordKey, key_prefix
from kvstore.storage.record import Record, encode_record
from kvstore.storage.tier import Tier
from tests.storage.builders import ALICE, BOB, content, noise, opaque, rows


class TierContract:
    """Subclasses define `make`, and `plant`, which passes by the tier."""

    def make(self, folder: Path) -> Tier:
        raise NotImplementedError

    def plant(self, tier: Tier, key: RecordKey, data: bytes) -> None:
        """Put bytes under a key where the tier keeps its records."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path):
        tier = self.make(tmp_path)
        yield tier
        tier.close()

    # ---- writing and reading ----

    def test_an_empty_tier_misses(self, tier):
        assert tier.get_many([opaque().key, rows().key]) == [None, None]
        assert not tier.contains(opaque().key)
        assert list(tier.iterate()) == []
        assert (tier.n_records, tier.n_bytes, tier.written) == (0, 0, 0)
        tier._check()

    @pytest.mark.parametrize("n_bytes", [0, 1, 100, 1900, 2000, 2100, 4096, 65536, 300_000, 1 << 20])
    def test_what_is_read_is_what_was_written_before_and_after_it_is_written(self, tier, n_bytes):
        record = opaque(n_bytes=n_bytes)
        tier.put_many([record])
        assert tier.get_many([record.key]) == [record]
        tier.flush()
        assert tier.get_many([record.key]) == [record]
        assert tier.n_bytes == record.n_bytes
        tier._check()

    def test_records_keep_shape_and_encoding(self, tier):
        tier.put_many([rows(2, layer=3)])
        [found] = tier.get_many([rows(2, layer=3).key])
        assert found == rows(2, layer=3)
        assert (found.shape, found.encoding) == (rows().shape, rows().encoding)

    def test_many_are_read_in_the_order_asked_for_with_none_for_the_missing(self, tier):
        tier.put_many(opaque(i) for i in range(20))
        tier.flush()
        tier.put_many(opaque(i) for i in range(20, 40))
        order = [39, 3, 99, 3, 20, 0]
        assert tier.get_many(opaque(i).key for i in order) == [None if i == 99 else opaque(i) for i in order]
        assert tier.get_many([]) == []

    def test_records_are_copies_of_what_was_given(self, tier):
        buffer = bytearray(noise(5000))
        tier.put_many([Record(opaque().key, buffer)])
        buffer[:] = bytes(5000)
        for _ in range(2):
            assert content(tier.get_many([opaque().key])[0]) == noise(5000)
            tier.flush()

    def test_the_last_record_under_a_key_counts(self, tier):
        tier.put_many([opaque(seed=1), opaque(seed=2, n_bytes=5000)])
        tier.put_many([opaque(seed=3, n_bytes=10)])
        assert tier.get_many([opaque().key]) == [opaque(seed=3, n_bytes=10)]
        tier.flush()
        assert tier.get_many([opaque().key]) == [opaque(seed=3, n_bytes=10)]
        assert (tier.n_records, tier.n_bytes) == (1, opaque(n_bytes=10).n_bytes)
        tier._check()

    def test_deleting_forgets_and_what_is_missing_is_no_error(self, tier):
        tier.put_many([opaque(0), opaque(1)])
        tier.delete_many([opaque(0).key, opaque(7).key])
        for _ in range(2):
            assert tier.get_many([opaque(0).key, opaque(1).key]) == [None, opaque(1)]
            assert not tier.contains(opaque(0).key)
            assert list(tier.iterate()) == [opaque(1).key]
            tier.flush()
        tier.delete_many([opaque(0).key])
        tier._check()
        assert tier.n_records == 1

    def test_a_batch_deletes_before_it_puts(self, tier):
        tier.put_many([opaque(0, seed=5)])
        tier.write(puts=[opaque(0)], deletes=[opaque(0).key])
        assert tier.get_many([opaque(0).key]) == [opaque(0)]
        tier._check()
        assert tier.n_records == 1

    def test_a_batch_with_a_record_that_is_none_changes_nothing(self, tier):
        tier.put_many([opaque(0)])
        with pytest.raises(ConfigError, match="bytes of RAW where"):
            tier.write([opaque(1), Record(rows().key, b"short", rows().shape)], [opaque(0).key])
        assert tier.get_many([opaque(0).key, opaque(1).key]) == [opaque(0), None]
        tier._check()

    def test_batches_are_numbered_and_flush_reaches_them(self, tier):
        first, second = tier.put_many([opaque(0)]), tier.put_many([opaque(1)])
        assert first < second
        tier.flush()
        assert tier.written == second
        tier.sync()

    # ---- keys ----

    def test_keys_come_ascending_and_by_prefix(self, tier):
        records = [rows(n, layer=layer, sequence=s) for n in (300, 2) for layer in (1, 0) for s in (BOB, ALICE)]
        tier.put_many([*records[:4], opaque(5, sequence=BOB)])
        tier.flush()
        tier.put_many(records[4:])
        keys = [record.key for record in records]
        assert list(tier.iterate()) == sorted([*keys, opaque(5, sequence=BOB).key])
        assert list(tier.iterate(key_prefix(Kind.ROWS))) == sorted(keys)
        assert list(tier.iterate(key_prefix(Kind.ROWS, BOB, 1))) == sorted(k for k in keys if k.sequence == BOB)
        assert [k.number for k in tier.iterate(key_prefix(Kind.ROWS, ALICE, 1, 1))] == [2, 300]
        assert list(tier.iterate(key_prefix(Kind.ROWS, ALICE, 2))) == []
        assert tier.contains(keys[0])

    def test_iterating_sees_one_moment(self, tier):
        tier.put_many(opaque(i) for i in range(10))
        keys = tier.iterate()
        first = next(keys)
        tier.delete_many(opaque(i).key for i in range(10))
        tier.put_many([opaque(99)])
        assert [first, *keys] == [opaque(i).key for i in range(10)]

    def test_the_highest_generation_and_number_are_keys_like_others(self, tier):
        key = RecordKey(Kind.TOKENS, b"\xff" * 16, (1 << 64) - 1, (1 << 16) - 1, (1 << 32) - 1)
        tier.put_many([Record(key, b"x")])
        tier.flush()
        assert list(tier.iterate(key.pack())) == [key]

    # ---- trust ----

    def test_a_record_under_another_key_is_refused(self, tier):
        tier.put_many([opaque(0), opaque(1)])
        tier.flush()
        self.plant(tier, opaque(0).key, encode_record(opaque(1)))
        with pytest.raises(CorruptBlockError, match="checksum"):
            tier.get_many([opaque(0).key])
        assert tier.get_many([opaque(1).key]) == [opaque(1)]

    def test_another_generation_of_a_sequence_is_a_miss(self, tier):
        tier.put_many([opaque(0)])
        assert tier.get_many([opaque(0).key._replace(generation=2)]) == [None]

    @pytest.mark.parametrize("damage", ["flip", "cut", "grow", "zero", "newer"])
    def test_a_damaged_record_is_an_error_and_never_bytes(self, tier, damage):
        tier.put_many([opaque(0), opaque(1)])
        tier.flush()
        data = bytearray(encode_record(opaque(0)))
        if damage == "flip":
            data[100] ^= 1
        elif damage == "newer":
            data[4] = 9
        else:
            data = {"cut": data[:-1], "grow": data + b"\0", "zero": bytearray(len(data))}[damage]
        self.plant(tier, opaque(0).key, bytes(data))
        with pytest.raises((CorruptStoreError, UnsupportedFormatError), match="TOKENS"):
            tier.get_many([opaque(1).key, opaque(0).key])
        assert tier.contains(opaque(0).key)
        tier.delete_many([opaque(0).key])
        assert tier.get_many([opaque(0).key]) == [None]

    # ---- accounting ----

    def test_accounting_equals_a_recount_after_random_operations(self, tier):
        chance = random.Random(5)
        for step in range(300):
            puts = [opaque(chance.randrange(30), chance.choice([10, 3000, 9000]), seed=step) for _ in range(2)]
            deletes = [opaque(chance.randrange(30)).key for _ in range(2)]
            tier.write(puts if chance.random() < 0.7 else (), deletes)
        tier._check()
        found = tier.get_many(tier.iterate())
        assert tier.n_bytes == sum(record.n_bytes for record in found)
        assert tier.n_records == len(found)
        tier.delete_many(list(tier.iterate()))
        tier._check()
        assert (tier.n_records, tier.n_bytes) == (0, 0)

    def test_vacuum_changes_nothing(self, tier):
        tier.put_many(opaque(i, 9000) for i in range(50))
        tier.delete_many(opaque(i).key for i in range(40))
        assert tier.vacuum() >= 0
        assert tier.get_many(opaque(i).key for i in (39, 40)) == [None, opaque(40, 9000)]
        tier.put_many([opaque(1)])
        tier._check()
        assert tier.n_records == 11

    # ---- threads, processes, the end ----

    def test_readers_never_see_half_a_batch(self, tier):
        done, wrong = threading.Event(), []

        def read():
            while not done.is_set():
                found = {content(record) for record in tier.get_many([opaque(0).key, opaque(1).key])}
                if len(found) != 1:
                    wrong.append(found)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for seed in range(100):
            tier.put_many([opaque(0, 5000, seed=seed), opaque(1, 5000, seed=seed)])
        done.set()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_threads_write_together(self, tier):
        def write(first):
            for i in range(first, first + 50):
                tier.put_many([opaque(i)])

        threads = [threading.Thread(target=write, args=(first,)) for first in (0, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier._check()
        assert tier.get_many(tier.iterate()) == [opaque(i) for i in range(150)]

    def test_a_closed_tier_says_so(self, tier):
        tier.put_many([opaque()])
        assert not tier.closed
        tier.close()
        tier.close()
        assert tier.closed
        calls = [
            lambda: tier.put_many([opaque()]),
            lambda: tier.delete_many([opaque().key]),
            lambda: tier.get_many([opaque().key]),
            lambda: tier.contains(opaque().key),
            lambda: list(tier.iterate()),
            tier.flush,
            tier.sync,
            tier.vacuum,
        ]
        for call in calls:
            with pytest.raises(StoreClosedError, match="is closed; open it again"):
                call()

    def test_a_with_block_closes(self, tmp_path):
        with self.make(tmp_path) as tier:
            tier.put_many([opaque()])
        assert tier.closed

    def test_a_tier_cannot_be_pickled(self, tier):
        with pytest.raises(ForkedStoreError, match="cannot be pickled; send its path"):
            pickle.dumps(tier)

    def test_another_process_cannot_use_it(self, tier, monkeypatch):
        tier.put_many([opaque()])
        tier.flush()
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: 1)
            for call in (tier.flush, tier.vacuum, lambda: tier.get_many([]), lambda: tier.put_many([opaque()])):
                with pytest.raises(ForkedStoreError, match="was opened by process"):
                    call()
        assert tier.get_many([opaque().key]) == [opaque()]
