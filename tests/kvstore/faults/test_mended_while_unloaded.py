"""A sequence that waits on disk while its rows are found lost there."""

import pytest

from kvstore import KVStore
from kvstore.storage.key import Kind, RecordKey
from tests.kvstore.faults.damaged import CONFIG, make
from tests.kvstore.faults.workload import SCHEMA, run, small, tokens_of


@pytest.fixture
def made(tmp_path):
    make(tmp_path / "s")
    return tmp_path / "s"


def test_a_sequence_that_waits_on_disk_while_it_is_mended_comes_back_as_long_as_it_is(made):
    with KVStore.open(made, SCHEMA, small(**CONFIG)) as store:
        seq = store["a"]
        store.unload("a")
        archive = store._persistence._archive
        lost = archive.entries["a"].layers[1][-1]
        archive.tier.delete_many([RecordKey(Kind.ROWS, lost.sequence, lost.generation, 1, lost.number)])
        assert {finding.sequence for finding in store.check(repair=True)} >= {"a"}
        n = lost.number * SCHEMA.block_tokens
        assert (len(seq), tokens_of(seq)) == (n, run(0, n))
        assert seq.positions().tolist() == list(range(n))
        store._check()
