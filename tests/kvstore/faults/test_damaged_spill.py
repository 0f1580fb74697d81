"""A damaged data file of a store: the right rows or one error, never others, and what is mended is sound."""

import json

import pytest

from kvstore import CorruptStoreError, KVStore
from kvstore.storage.key import Kind, RecordKey
from tests.kvstore.faults.damaged import ALL, CONFIG, make, spill
from tests.kvstore.faults.workload import SCHEMA, found, small
from tests.storage.processes import run_python

ERRORS = {"CorruptStoreError", "CorruptBlockError", "BlockNotFoundError", "UnsupportedFormatError"}
RUN = "import sys, pathlib as p; from tests.kvstore.faults import damaged; damaged.main(p.Path(sys.argv[1]), {!r}, {})"


@pytest.fixture
def made(tmp_path):
    make(tmp_path / "s")
    return tmp_path / "s"


def counts_of(folder, mode, every):
    """Have a child do one in so many damages; how often came what."""
    return json.loads(run_python(RUN.format(mode, every), folder))


def test_a_store_whose_file_is_cut_off_anywhere_is_refused(tmp_path):
    counts = counts_of(tmp_path, "truncated", 1)
    assert counts.pop("CorruptStoreError") > 50
    assert set(counts) <= {"whole", "cut"}  # what was cut off was free, or the end of one record


SAMPLES = [("flipped", 10), ("swapped", 4)]
ALL_OF_THEM = [pytest.param(mode, 1, marks=pytest.mark.slow) for mode, _ in SAMPLES]


@pytest.mark.parametrize(("mode", "every"), [*SAMPLES, *ALL_OF_THEM])
def test_flipped_bits_and_swapped_records_never_give_other_rows_and_can_be_mended(tmp_path, mode, every):
    counts = counts_of(tmp_path, mode, every)
    rare = sum(counts.pop(name, 0) for name in ("missed", "unreachable", "beyond repair"))  # a key, or LMDB's own nodes
    assert rare <= 1 + sum(counts.values()) / 100
    assert set(counts) <= {"whole", "cut", *ERRORS}
    assert counts["cut"] > 0


def change_after_key(path, key, n_bytes):
    """Turn one bit so many bytes after each place where a key lies."""
    data = bytearray(path.read_bytes())
    at = data.find(key)
    while at >= 0:
        data[at + n_bytes] ^= 1
        at = data.find(key, at + 1)
    path.write_bytes(data)


def test_damaged_tokens_are_found_and_forgotten_and_the_rows_stay(made):
    with KVStore.open(made, SCHEMA, small(**CONFIG)) as store:
        entry = store._persistence._archive.entries["b"]
        tokens = RecordKey(Kind.TOKENS, entry.sequence, entry.generation)
    change_after_key(spill(made), tokens.pack(), 110)
    with KVStore.open(made, SCHEMA, small(**CONFIG)) as store:
        with pytest.raises(CorruptStoreError):
            store["b"]
        assert [(finding.kind, finding.sequence) for finding in store.check(repair=True)] == [("tokens", "b")]
        assert store.check() == []
        assert found(store) == ALL
        assert store["b"].tokens.tolist() == []
    with KVStore.open(made, SCHEMA, small(**CONFIG)) as store:
        assert found(store) == ALL
