"""What happens to first indexes that are being built when their rows go, or their work fails."""

import gc
import threading

import numpy as np
import pytest

from kvstore import ConfigError, IndexConfig, KVStore, MaintenanceError, StoreClosedError
from tests.builders import SCHEMA, fill, flat_config, make_query, make_rows, same_bits
from tests.executors import Stepping
from tests.kvstore.test_larger_than_memory import SCHEMA as BIG
from tests.kvstore.test_larger_than_memory import limited
from tests.kvstore.test_overlap import assert_same, config, late, stepping

STEPS = [0, 1, 2, 3]  # check points that the work has passed: none, begun, has read, has trained


def stepped(n_steps, **changes):
    """A store whose two builds have come so far, their rows committed."""
    store, seq, worker = stepping(**changes)
    fill(seq, 100, seed=0)
    for work in worker.works:
        for _ in range(n_steps):
            work.step()
    return store, seq, worker


def exact():
    """The same rows without an index."""
    seq = KVStore(SCHEMA, flat_config()).create("book")
    fill(seq, 100, seed=0)
    return seq


# ---- rows that go ----


@pytest.mark.parametrize("n_steps", STEPS)
@pytest.mark.parametrize("layers", [1, 2])
def test_an_aborted_step_gives_its_builds_up(n_steps, layers):
    store, seq, worker = stepping()
    _, other = late()
    rows = make_rows(SCHEMA, 100, seed=5)
    seq.begin_step()
    for layer in range(layers):
        seq.append(layer, *rows[layer])
        for _ in range(n_steps):
            worker.works[-1].step()
    seq.abort_step()
    store._check()
    assert not any(keeper.rebuilding for keeper in seq._indexes)
    for who in (seq, other):
        fill(who, 100, seed=0)
    worker.finish()
    assert_same(seq, other)
    assert store.stats().index_builds == 2


def test_a_commit_with_a_layer_missing_gives_them_up_too():
    _, seq, worker = stepping()
    seq.begin_step()
    seq.append(0, *make_rows(SCHEMA, 100, seed=5)[0])
    with pytest.raises(Exception, match="rolled back"):
        seq.commit_step()
    worker.finish()
    seq._store.wait()
    assert seq._indexes[0].index is None


@pytest.mark.parametrize("n_steps", STEPS)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("keep", [0, 50, 99, 100])
def test_a_truncate_is_one_of_a_table_with_its_index_or_of_one_without(n_steps, wait, keep):
    store, seq, worker = stepped(n_steps, wait=wait)
    _, other = late()
    fill(other, 100, seed=0)
    seq.truncate(keep)
    other.truncate(keep)
    store._check()
    if wait:
        assert_same(seq, other) if keep else None
        assert seq._indexes[0].index is not None
    fill(seq, 100, seed=1)
    fill(other, 100, seed=1)
    worker.finish()
    store.wait()
    store._check()
    if wait:
        assert_same(seq, other)
    assert seq._indexes[0].covered is not None


@pytest.mark.parametrize("n_steps", STEPS)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("keep", [None, 60])
def test_a_fork_has_the_index_of_its_origin_or_builds_its_own(n_steps, wait, keep):
    store, seq, worker = stepped(n_steps, wait=wait)
    _, other = late()
    fill(other, 100, seed=0)
    twins = [who.fork("twin", keep) for who in (seq, other)]
    if wait:
        assert_same(*twins)
    for who in (seq, other, *twins):
        fill(who, 30, seed=7)
    worker.finish()
    store.wait()
    store._check()
    if wait:
        assert_same(*twins)
        assert_same(seq, other)
    assert twins[0]._indexes[1].covered[1] == len(twins[0]) - 8
    store.drop("book")
    twins[0].attend(0, make_query(SCHEMA, 0))


@pytest.mark.parametrize("n_steps", STEPS)
def test_a_drop_gives_the_builds_up_and_the_room_to_others(n_steps):
    store, _, worker = stepped(n_steps)
    _, other = late()
    store.drop("book")
    fresh = store.create("fresh")
    for who in (fresh, other):
        fill(who, 100, seed=3)
    worker.finish()
    assert_same(fresh, other)
    store._check()


def test_a_block_that_a_dropped_fork_gives_back_is_not_read():
    """A table leaves its shared last block when it grows; here the build reads rows of that block."""
    store, seq, worker = stepping(wait=False)
    _, other = late()
    for who in (seq, other):
        fill(who, 111, seed=0)
    seq.fork("twin")
    fill(seq, 1, seed=1)  # leaves the last block to the twin
    store.drop("twin")
    fill(store.create("next"), 16, seed=9)  # takes it
    worker.finish()
    for layer in range(2):
        seq.attend(layer, make_query(SCHEMA, 0))
        assert seq._indexes[layer].covered == (2, 103)
        assert np.array_equal(seq._indexes[layer].index.codes, other._indexes[layer].index.codes)


@pytest.mark.parametrize("n_steps", STEPS)
def test_closing_gives_them_up(n_steps):
    before = threading.active_count()
    store, seq, worker = stepped(n_steps)
    store.close()
    assert threading.active_count() == before
    assert not worker.open
    with pytest.raises(StoreClosedError):
        seq.attend(0, make_query(SCHEMA, 0))
    del store, seq
    gc.collect()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("how", ["unload", "close", "kill"])
def test_what_comes_back_from_the_disk_has_its_index(tmp_path, how, wait):
    settings = config(wait=wait)
    _, other = late()
    fill(other, 100, seed=0)
    with KVStore.open(tmp_path / "s", SCHEMA, settings) as store:
        store.maintenance.executor = Stepping()
        seq = store.create("book")
        fill(seq, 100, seed=0)
        if how == "unload":
            store.unload("book")
            assert not any(keeper.rebuilding for keeper in seq._indexes)
            store.maintenance.executor.finish()
            assert_same(store["book"], other) if wait else store["book"].attend(0, make_query(SCHEMA, 0))
        if how == "kill":
            store.flush()  # rows only: what is built is not there yet
    with KVStore.open(tmp_path / "s") as store:
        fresh = store["book"]
        store.wait()
        store._check()
        assert_same(fresh, other)


@pytest.mark.parametrize("n_steps", STEPS)
def test_a_build_whose_blocks_move_to_the_disk_is_begun_again_at_the_next_commit(tmp_path, n_steps):
    with KVStore.open(tmp_path / "s", BIG, limited(config(wait=False))) as store:
        store.maintenance.executor = worker = Stepping()
        seq = store.create("book")
        fill(seq, 150, seed=0)
        first = [keeper._first for keeper in seq._indexes]
        for _ in range(n_steps):
            worker.works[0].step()
        fill(seq, 200, seed=1)
        assert seq._tables[0].n_spilled > 0
        assert seq._indexes[1].building
        assert seq._indexes[1]._first is not first[1]
        store.wait()
        store._check()
        for layer in range(2):
            assert seq._indexes[layer].covered == (2, 342)
            fresh = seq._indexes[layer].index.clone()
            fresh.truncate(2)
            fresh.add(seq.read(layer)[0].numpy()[:, 2:342].copy(), seq.positions()[2:342])
            assert np.array_equal(fresh.codes, seq._indexes[layer].index.codes)


# ---- work that fails ----


@pytest.mark.parametrize("n_steps", STEPS[:3])
@pytest.mark.parametrize("through", ["attend", "topk", "wait", "begin_step"])
def test_a_failure_surfaces_once_and_its_layer_is_scanned_exactly(n_steps, through):
    store, seq, worker = stepped(n_steps)
    plain, q = exact(), make_query(SCHEMA, 0)
    worker.works[1].fail(MemoryError("no room"))
    with pytest.raises(MaintenanceError, match="no room") as caught:
        if through == "attend":
            seq.attend(1, q)
        elif through == "topk":
            seq.topk(1, 0, q[:2], 5)
        elif through == "wait":
            store.wait()
        else:
            seq.begin_step()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not seq.step_open
    assert same_bits(seq.attend(1, q), plain.attend(1, q))
    assert seq.explain(1, q).plan.reason == "no index"
    fill(seq, 200, seed=1)
    assert seq._indexes[0].covered == (2, 292)
    assert seq._indexes[1].covered is None  # not tried again by itself
    seq.reindex(1)
    assert seq._indexes[1].covered == (2, 292)
    store.wait()
    store._check()


def test_a_failure_in_an_open_step_waits_for_the_next_call_after_it():
    store, seq, worker = stepping()
    rows = make_rows(SCHEMA, 100, seed=0)
    with seq.step():
        seq.append(0, *rows[0])
        worker.works[0].fail(MemoryError("no room"))
        seq.append(1, *rows[1])
        seq.attend(0, make_query(SCHEMA, 0))
    assert len(seq) == 100
    with pytest.raises(MaintenanceError):
        seq.begin_step()
    seq.begin_step()
    seq.abort_step()
    store.wait()
    assert seq._indexes[1].covered == (2, 92)


def test_a_failure_of_a_step_that_is_taken_back_is_nobodys():
    store, seq, worker = stepping()
    seq.begin_step()
    seq.append(0, *make_rows(SCHEMA, 100, seed=0)[0])
    worker.works[0].fail(MemoryError("no room"))
    seq.abort_step()
    fill(seq, 100, seed=1)
    store.wait()
    assert seq._indexes[0].covered == (2, 92)


@pytest.mark.parametrize("then", ["truncate", "fork", "commit", "reindex", "background", "unload"])
def test_after_a_failure_that_nobody_has_seen_everything_goes_on(then, tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, config()) as store:
        store.maintenance.executor = worker = Stepping()
        seq = store.create("book")
        fill(seq, 100, seed=0)
        worker.works[0].fail(MemoryError("no room"))
        if then == "truncate":
            seq.truncate(60)
        elif then == "fork":
            assert seq.fork("twin")._indexes[1].covered == (2, 92)
        elif then == "commit":
            with pytest.raises(MaintenanceError):
                fill(seq, 8, seed=1)
        elif then == "unload":
            store.unload("book")
        else:
            seq.reindex(background=then == "background")
        store._check()
        while any(keeper.rebuilding for keeper in store["book"]._indexes):
            try:
                store.wait()
            except MaintenanceError:
                assert then == "fork"
        fill(seq, 100, seed=2)
        store.wait()
        assert seq._indexes[1].covered[1] == len(seq) - 8
        assert (seq._indexes[0].covered is None) == (then in ("fork", "commit"))


def test_a_wait_has_its_limit():
    store, seq, worker = stepped(1)
    with pytest.raises(TimeoutError):
        store.wait(timeout_s=0)
    worker.finish()
    store.wait(timeout_s=0)
    assert seq._indexes[0].covered == (2, 92)


# ---- settings, and the real threads ----


@pytest.mark.parametrize(
    "wrong", [{"build": "later"}, {"build": None}, {"wait": 1}, {"threads": 0}, {"threads": True}, {"threads": 1.5}],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        IndexConfig(**wrong)


def test_real_threads_give_the_same_and_end_with_the_store():
    before = threading.active_count()
    with KVStore(SCHEMA, config(threads=3)) as store:
        for i in range(8):
            seq = store.create(f"s{i}")
            fill(seq, 100 + i, seed=i)
            if i % 3 == 0:
                store.drop(f"s{i}")
            elif i % 3 == 1:
                seq.truncate(60)
        assert threading.active_count() <= before + 3
        _, other = late()
        for i in range(8):
            other = other._store.create(f"s{i}")
            fill(other, 100 + i, seed=i)
            if i % 3 == 1:
                other.truncate(60)
            if i % 3:
                assert_same(store[f"s{i}"], other)
        store._check()
    assert threading.active_count() == before
