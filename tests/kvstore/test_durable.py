"""A store in a directory: what is there when it is opened again."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from kvstore import (
    ConfigError,
    CorruptStoreError,
    IndexConfig,
    KVStore,
    RopeSpec,
    SchemaMismatchError,
    SequenceNotFoundError,
    SpillFullError,
    StorageError,
    StoreClosedError,
    StoreLockedError,
)
from kvstore.storage.extents import EXTENT_BYTES
from tests.builders import SCHEMA, append, cut, fill, flat_config, make_query, make_rows, pq_config, same_bits

ROPE_SCHEMA = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(1e4, SCHEMA.head_dim),) * SCHEMA.n_layers)
MIB = 1 << 20


def small(**changes):
    return pq_config(**{"spill_bytes": 64 * MIB, **changes})


def weighted():
    index = IndexConfig("pq", {"m": 1, "bits": 5, "weighting": "queries"}, min_rows=24, append_rows=8)
    return flat_config(index=index, spill_bytes=64 * MIB)


def of_model():
    index = IndexConfig("pq", {"m": 1, "bits": 5}, min_rows=24, append_rows=8, codebook="model", codebook_rows=100)
    return flat_config(index=index, spill_bytes=64 * MIB)


CONFIGS = {
    "raw": (SCHEMA, small()),
    "rope": (ROPE_SCHEMA, dataclasses.replace(small(), index=IndexConfig("pq", min_rows=24, append_rows=8))),
    "weighted": (ROPE_SCHEMA, weighted()),
    "model": (ROPE_SCHEMA, of_model()),
    "flat": (SCHEMA, flat_config(spill_bytes=64 * MIB)),
    "sq8": (SCHEMA, flat_config(index=IndexConfig("sq8", min_rows=24, append_rows=8), spill_bytes=64 * MIB)),
}
every_config = pytest.mark.parametrize(("schema", "config"), list(CONFIGS.values()), ids=list(CONFIGS))


def answers(seq, schema, seeds=range(3)):
    return [seq.attend(layer, make_query(schema, i)) for layer in range(schema.n_layers) for i in seeds]


def all_same(ours, theirs):
    return all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- what comes back ----


@every_config
@pytest.mark.parametrize("n", [1, 63, 64, 300])
def test_a_sequence_and_its_answers_come_back(tmp_path, schema, config, n):
    rows = make_rows(schema, n, 3)
    with KVStore.open(tmp_path / "s", schema, config) as store:
        seq = store.create("book")
        with seq.step():
            for layer, (keys, values) in enumerate(rows):
                seq.append(layer, keys, values)
                seq.observe_queries(layer, make_rows(schema, 20, 9)[0][0].repeat(schema.group, 1, 1))
        seq.budget = 30
        before, trained = answers(seq, schema), [keeper.n_builds for keeper in seq._indexes]
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert (list(store), len(store), "book" in store) == (["book"], 1, True)
        seq = store["book"]
        assert (len(seq), seq.budget) == (n, 30)
        for layer, (keys, values) in enumerate(rows):
            assert same_bits(seq.read(layer)[0], keys)
            assert same_bits(seq.read(layer)[1], values)
        assert all_same(answers(seq, schema), before)
        if config.index.kind == "pq" and n == 300:
            assert min(trained) >= 0
            assert [keeper.n_builds for keeper in seq._indexes] == [0] * schema.n_layers  # nothing was trained again
        store._check()


@every_config
def test_going_on_is_as_if_it_had_never_been_closed(tmp_path, schema, config):
    rows = make_rows(schema, 400, 3)
    whole = KVStore(schema, config).create("book")
    append(whole, cut(rows, 0, 300))
    with KVStore.open(tmp_path / "s", schema, config) as store:
        append(store.create("book"), cut(rows, 0, 300))
    for low in range(300, 400, 20):
        append(whole, cut(rows, low, low + 20))
        with KVStore.open(tmp_path / "s", config=config) as store:
            append(store["book"], cut(rows, low, low + 20))
            if config.index.kind == "pq":
                assert all_same(answers(store["book"], schema), answers(whole, schema))
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert all(same_bits(a, b) for i in range(2) for a, b in zip(store["book"].read(i), whole.read(i), strict=True))


def test_positions_padding_and_several_sequences_come_back(tmp_path):
    positions = np.concatenate([np.arange(5, 60), np.arange(1000, 1045)])
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        first, second = store.create("a", first_row=3), store.create("b")
        append(first, make_rows(SCHEMA, 100, 1), positions)
        fill(second, 70, seed=2)
        store.create("empty")
    with KVStore.open(tmp_path / "s", config=small()) as store:
        assert sorted(store) == ["a", "b", "empty"]
        assert store["a"].first_row == 3
        assert store["a"].positions().tolist() == positions.tolist()
        assert (len(store["b"]), len(store["empty"])) == (70, 0)
        assert store["b"].generation < store.create("c").generation


def test_a_fork_shares_rows_on_disk_and_outlives_its_parent(tmp_path):
    config = small()
    rows = make_rows(SCHEMA, 6001, 1)
    with KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        parent = store.create("parent")
        append(parent, cut(rows, 0, 6000))
        store.flush()
        alone = store.stats().disk_bytes
        child = parent.fork("child")
        append(child, cut(rows, 6000, 6001))
        store.flush()
        assert store.stats().disk_bytes < 1.3 * alone
        store.drop("parent")
        store.flush()
        store._persistence._archive._check()
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert list(store) == ["child"]
        assert same_bits(store["child"].read(1)[0], rows[1][0])


def test_a_fork_of_rows_whose_records_are_gone_writes_them_again(tmp_path):
    rows = make_rows(SCHEMA, 300, 1)
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        parent = store.create("parent")
        append(parent, rows)
        store.flush()
        parent.fork("child")  # never saved while the parent was there
        store.drop("parent")
    with KVStore.open(tmp_path / "s", config=small()) as store:
        assert same_bits(store["child"].read(0)[0], rows[0][0])


def test_dropped_sequences_give_their_room_back(tmp_path):
    config = small()
    with KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        for i in range(3):
            fill(store.create(f"s{i}"), 2000, seed=i)
        store.flush()
        full = store.stats().disk_bytes
        for i in range(3):
            store.drop(f"s{i}")
        store.flush()
        assert store.stats().disk_bytes < 0.01 * full
        assert store.vacuum() > 0.9 * full
        with pytest.raises(SequenceNotFoundError):
            store["s0"]
        fill(store.create("s0"), 10)
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert [len(store[name]) for name in store] == [10]


def test_only_what_is_new_is_written(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        seq = store.create("book")
        fill(seq, 4000)
        store.flush()
        written = []
        put_many = store._persistence._directory.tier.put_many
        store._persistence._directory.tier.put_many = lambda records: put_many(
            [written.append(len(r.payload)) or r for r in records]
        )
        store.flush()
        assert written == []
        fill(seq, 10)
        store.flush()
        assert 0 < sum(written) <= SCHEMA.n_layers * (EXTENT_BYTES + SCHEMA.block_bytes)  # the last one grows


# ---- when it is saved ----


def test_rows_are_sent_to_the_disk_by_themselves(tmp_path):
    config = small(flush_rows=100)
    with KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        seq = store.create("book")
        for _ in range(7):
            fill(seq, 30)
        store._persistence._directory.tier.flush()
        assert elsewhere(tmp_path / "s", "print(len(store['book']))") == "120"


def elsewhere(path, code):
    """What other process prints that has the store open to be read."""
    lines = [
        "from kvstore import KVStore, ReadOnlyStoreError",
        "from tests.builders import SCHEMA, fill, make_query",
        f"store = KVStore.open({str(path)!r}, readonly=True)",
        *textwrap.dedent(code).splitlines(),
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


KILLED = """
import sys
from kvstore import KVStore
from tests.builders import SCHEMA, append, cut, make_rows
from tests.kvstore.test_durable import small
rows = make_rows(SCHEMA, 5000, 1)
store = KVStore.open(sys.argv[1], SCHEMA, small(flush_rows=50))
seq = store["book"] if "book" in store else store.create("book")
while len(seq) < 4900:
    append(seq, cut(rows, len(seq), len(seq) + 7))
    if len(seq) % 5 == 0:
        store.flush()
        print(len(seq), flush=True)
"""


def flushed_before_death(path, seconds):
    """Rows that a child says it has flushed, until it is killed so long after its first flush."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        first = child.stdout.readline()
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        return [int(line) for line in [first, *child.stdout] if line.strip().isdigit()]


@pytest.mark.parametrize("trial", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 100))])
def test_kill_9_at_any_moment_loses_nothing_that_was_flushed(tmp_path, trial):
    rows, surely = make_rows(SCHEMA, 5000, 1), 0
    for round_number in range(2):
        surely = max([surely, *flushed_before_death(tmp_path / "s", 0.02 + 0.037 * ((7 * trial + round_number) % 11))])
        with KVStore.open(tmp_path / "s", config=small()) as store:
            seq = store["book"]
            assert len(seq) >= surely
            assert len(seq) % 7 == 0  # whole steps
            for layer in range(SCHEMA.n_layers):
                for stored, given in zip(seq.read(layer), rows[layer], strict=True):
                    assert same_bits(stored, given[:, : len(seq)])
            store._persistence._archive._check()
            assert store.check() == []
            surely = len(seq)


# ---- who may open it, and with what ----


def test_a_second_writer_is_told_who_has_it_and_a_reader_sees_what_is_flushed(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 50)
        store.flush()
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
            KVStore.open(tmp_path / "s", SCHEMA, small())
        code = """
            print(len(store["book"]), store["book"].attend(0, make_query(SCHEMA, 1)).isfinite().all().item())
            changes = [lambda: store.create("x"), lambda: store.drop("book"), lambda: fill(store["book"], 1)]
            for change in [*changes, store.checkpoint, store.vacuum]:
                try:
                    change()
                except ReadOnlyStoreError:
                    print("refused")
            store.close()
        """
        assert elsewhere(tmp_path / "s", code).split() == ["50", "True", *["refused"] * 5]
        fill(store["book"], 5)
    KVStore.open(tmp_path / "s").close()


def test_another_schema_or_no_store_is_refused(tmp_path):
    KVStore.open(tmp_path / "s", SCHEMA, small()).close()
    with pytest.raises(SchemaMismatchError, match="head_dim is"):
        KVStore.open(tmp_path / "s", dataclasses.replace(SCHEMA, head_dim=32, value_dim=32), small())
    with pytest.raises(StorageError, match="no store"):
        KVStore.open(tmp_path / "nowhere", readonly=True)
    with pytest.raises(StorageError, match="schema"):
        KVStore.open(tmp_path / "new")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="is a file"):
        KVStore.open(tmp_path / "file", SCHEMA)
    for wrong in ({"spill_bytes": 0}, {"durability": "hope"}, {"flush_rows": -1}, {"encoding": "int3"}):
        with pytest.raises(ConfigError):
            flat_config(**wrong)
    KVStore.open(tmp_path / "s", SCHEMA, small()).close()  # all locks were given back


def test_a_closed_store_answers_nothing_and_closing_twice_is_fine(tmp_path):
    store = KVStore.open(tmp_path / "s", SCHEMA, small())
    store.create("book")
    store.close()
    store.close()
    for call in (store.flush, store.checkpoint, store.vacuum, lambda: store["book"], lambda: store.create("x")):
        with pytest.raises(StoreClosedError):
            call()


def test_an_index_of_other_settings_is_built_again(tmp_path, caplog):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        fill(store.create("book"), 300)
    other = flat_config(index=IndexConfig("pq", {"m": 4, "bits": 3}, min_rows=24), spill_bytes=64 * MIB)
    with KVStore.open(tmp_path / "s", config=other) as store:
        index = store["book"]._indexes[0].index
        assert (index.layout.m, index.n_rows) == (4, 290)
    assert "built again" in caplog.text


# ---- when the disk refuses ----


def test_a_full_spill_is_an_error_and_nothing_is_lost(tmp_path):
    config = dataclasses.replace(small(flush_rows=0), spill_bytes=4 * MIB)
    with pytest.raises(SpillFullError), KVStore.open(tmp_path / "s", SCHEMA, config) as store:
        seq = store.create("book")
        rows = fill(seq, 1000)
        store.flush()
        fill(seq, 30_000, seed=2)
        with pytest.raises(SpillFullError):
            store.flush()
        assert len(seq) == 31_000
        seq.truncate(1010)
        store.flush()  # it fits again
        assert same_bits(seq.read(0, 0, 1000)[0], rows[0][0])
        fill(seq, 30_000, seed=2)  # and closing says that this is not on disk
    with KVStore.open(tmp_path / "s", config=config) as store:
        assert len(store["book"]) == 1010
        assert same_bits(store["book"].read(0, 0, 1000)[0], rows[0][0])


@pytest.mark.parametrize("n_th", range(1, 9))
def test_a_write_that_fails_is_made_good_by_the_next_flush(tmp_path, n_th):
    from tests.storage.wrappers import FaultyTier

    rows = make_rows(SCHEMA, 500, 1)
    with KVStore.open(tmp_path / "s", SCHEMA, small(flush_rows=0)) as store:
        seq = store.create("book")
        append(seq, cut(rows, 0, 200))
        store.flush()
        archive = store._persistence._archive
        sound = archive.tier
        append(seq, cut(rows, 200, 500))
        archive.tier = FaultyTier(sound, n_th)
        try:
            store.flush()
        except StorageError:
            assert len(seq) == 500
        archive.tier = sound
        store.flush()
        archive._check()
    with KVStore.open(tmp_path / "s", config=small()) as store:
        for layer in range(SCHEMA.n_layers):
            assert same_bits(store["book"].read(layer)[0], rows[layer][0])


def test_settings_are_remembered_and_may_be_replaced(tmp_path):
    config = small(sinks=7, budget=0.3)
    KVStore.open(tmp_path / "s", SCHEMA, config).close()
    with KVStore.open(tmp_path / "s") as store:
        assert store.config == config
    with KVStore.open(tmp_path / "s", config=small(sinks=8, budget=lambda *_: 5)):
        pass
    with KVStore.open(tmp_path / "s") as store:
        assert (store.config.sinks, store.config.budget) == (8, None)
    (tmp_path / "s" / "config.json").write_text('{"sinks": "many"')
    with pytest.raises(CorruptStoreError, match="no settings"):
        KVStore.open(tmp_path / "s")
    (tmp_path / "s" / "config.json").write_text('{"sinkz": 3}')
    with pytest.raises(CorruptStoreError, match="sinkz"):
        KVStore.open(tmp_path / "s")
    KVStore.open(tmp_path / "s", config=config).close()


def test_a_budget_that_is_a_rule_comes_back_as_the_configured_one(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small(budget=40)) as store:
        seq = store.create("book")
        fill(seq, 100)
        seq.budget = lambda layer, head, n: n // 2
    with KVStore.open(tmp_path / "s") as store:
        assert store["book"].budget == 40


def test_what_a_killed_save_has_left_is_deleted_at_the_next_start(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small(flush_rows=0)) as store:
        fill(store.create("book"), 300)
        store.flush()
        archive = store._persistence._archive
        n = archive.tier.n_records
        extents = archive._rows.extents(0, 300, b"x" * 16, 99)
        archive.tier.put_many(list(archive._rows.records(store["book"]._tables[0], 0, extents)))
        archive.tier.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    with KVStore.open(tmp_path / "killed") as store:
        assert store.check() == []
        assert store._persistence._directory.tier.n_records == n
        assert len(store["book"]) == 300


def test_what_is_not_kept_never_goes_to_the_disk(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small(flush_rows=50)) as store:
        book, scratch = store.create("book"), store.create("scratch", keep=False)
        fill(book, 200)
        fill(scratch, 200)
        book.fork("guess", keep=False)
        store.checkpoint()
        assert store._persistence.names == ["book"]
        assert sorted(store) == ["book", "guess", "scratch"]
        with pytest.raises(ConfigError, match="keep=False"):
            store.unload("scratch")
        store.drop("guess")
    with KVStore.open(tmp_path / "s") as store:
        assert list(store) == ["book"]
