"""Drift: its estimate, and training again beside everything else."""

import threading

import numpy as np
import pytest
import torch

from kvstore import IndexConfig, KVStore, MaintenanceError, RopeSpec, Schema, StoreClosedError, StoreConfig
from kvstore.drift import MEMORY_ROWS, Drift, sample_rows
from tests.builders import SCHEMA, append, cut, fill, filled, flat_config, make_query, make_rows, pq_config, same_bits
from tests.executors import ByHand
from tests.index.oracles import rotate


def by_hand(config=None, n=150, schema=SCHEMA):
    store, seq, rows = filled(schema, config or pq_config(), n)
    store.maintenance.executor = ByHand()
    return store, seq, rows, store.maintenance.executor


def indexes(seq):
    return [keeper.index for keeper in seq._indexes]


def assert_serves(store, seq):
    """Coverage is right, and every covered row has the code of its key."""
    store._check()
    for layer, keeper in enumerate(seq._indexes):
        index = keeper.index
        assert index.stop_row == len(seq) - 8
        fresh = index.clone()
        fresh.truncate(2)
        fresh.add(seq.read(layer)[0].numpy()[:, 2 : index.stop_row].copy(), seq.positions()[2 : index.stop_row])
        assert np.array_equal(fresh.codes, index.codes)


# ---- the estimate ----


def test_the_estimate_is_error_over_the_reference_and_recent_rows_count_most():
    drift = Drift(np.array([2.0, 4.0], np.float32))
    drift.observe(np.full((2, 16), 2.0, np.float32))
    assert drift.ratio is None
    drift.observe(np.full((2, 16), 2.0, np.float32))
    assert drift.ratio == pytest.approx((1 + 0.5) / 2)
    twin = drift.clone()
    for _ in range(5 * MEMORY_ROWS // 64):
        drift.observe(np.full((2, 64), 8.0, np.float32))
    assert drift.ratio == pytest.approx((4 + 2) / 2, rel=0.05)
    assert twin.ratio == pytest.approx(0.75)
    twin.observe(np.empty((2, 0), np.float32))
    assert twin.n_sampled == 32


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 6), (10, 74), (10, 75), (3, 100_000)])
def test_sampled_rows_lie_in_the_range_and_are_few(start, stop):
    rows = sample_rows(start, stop)
    assert len(rows) == len(set(rows.tolist())) == min(64, stop - start)
    assert ((rows >= start) & (rows < stop)).all()


@pytest.mark.parametrize("n", [40, 100, 400, 3000])
def test_rows_like_those_trained_on_have_a_ratio_near_one(n):
    """However few rows a centroid has: the error on the rows trained on would say 0 for the fewest."""
    config = pq_config()
    _, seq, _ = filled(SCHEMA, config, n)
    for i in range(20):
        fill(seq, 32, seed=i + 1)
    assert all(keeper.drift_ratio == pytest.approx(1.0, abs=0.25) for keeper in seq._indexes)


def test_looking_at_drift_reads_no_row_again(monkeypatch):
    _, seq, _ = filled(SCHEMA, pq_config(), 2000)
    table = type(seq._tables[0])
    read = []
    real = table.read_keys
    monkeypatch.setattr(table, "read_keys", lambda self, a, b: read.append(b - a) or real(self, a, b))
    fill(seq, 10, seed=1)
    assert read == [10, 10]


def test_drift_is_shown():
    store, seq, _ = filled(SCHEMA, pq_config(), 300)
    assert store.stats().drift == 0.0
    assert "drift" not in seq.explain(0, make_query(SCHEMA, 0)).index
    append(seq, [(9 + 4 * keys, values) for keys, values in make_rows(SCHEMA, 64, seed=1)])
    explained = seq.explain(0, make_query(SCHEMA, 0))
    assert explained.index["drift"] > 3
    assert f"drift={explained.index['drift']}" in str(explained)
    assert store.stats().drift == max(keeper.drift_ratio for keeper in seq._indexes)
    child = seq.fork("child")
    assert child._indexes[0].drift_ratio == seq._indexes[0].drift_ratio


# ---- rotated keys ----

ROPE = RopeSpec.from_theta(1e5, 16)
SIZES = np.tile([0.2, 0.2, 0.3, 2, 3, 3, 1, 1], 2)  # of each pair: as in real keys, most lies in pairs that turn slowly
TRAINED = 400


def text(n, seed=0):
    """Keys of a head whose keys are alike before RoPE, rotated: float32 [1, n, 16]."""
    generator = np.random.default_rng(seed)
    kinds = SIZES * (1 + generator.standard_normal((24, 16)))
    plain = kinds[generator.integers(0, 24, n)] + 0.3 * generator.standard_normal((n, 16))
    return torch.from_numpy(rotate(plain[None], np.arange(n), ROPE).astype(np.float32))


def recall(seq, keys, n_queries=40, k=20):
    """Share of the exact top k that the index alone finds, over the newest half of the rows."""
    index, total = seq._indexes[0].index, 0.0
    start, stop = index.stop_row // 2, index.stop_row
    generator = np.random.default_rng(9)
    for _ in range(n_queries):
        near = keys[0, generator.integers(start, stop)].numpy() + 0.5 * generator.standard_normal(16)
        q = near.astype(np.float32)[None, None]
        found = index.search(q, k, scale=0.25, reduce="max", start=start, stop=stop).rows[0]
        exact = start + np.argsort(-(keys[0, start:stop].numpy() @ q[0, 0]))[:k]
        total += len(set(found.tolist()) & set(exact.tolist())) / k
    return total / n_queries


def growing(space, factor):
    schema = Schema(1, 1, 1, 16, rope=(ROPE,))
    options = {"space": space, "m": 1, "bits": 6, "iterations": 10}
    config = StoreConfig(sinks=0, window=1, index=IndexConfig(options=options, append_rows=1, min_rows=TRAINED))
    store = KVStore(schema, config)
    seq = store.create("book")
    keys = text(TRAINED * (1 + factor) + 1)
    append(seq, [(keys[:, : TRAINED + 1], keys[:, : TRAINED + 1])])
    for at in range(TRAINED + 1, keys.shape[1], 100):
        part = keys[:, at : at + 100]
        append(seq, [(part, part)])
    return store, seq, keys


@pytest.mark.parametrize("factor", [1, 3, 8])
def test_rotated_keys_drift_and_a_reindex_mends_it(factor):
    store, seq, keys = growing("raw", factor)
    stale = recall(seq, keys)
    assert seq._indexes[0].drift_ratio > 2
    seq.reindex(background=True)
    store.wait()
    assert recall(seq, keys) > stale + 0.1
    assert seq._indexes[0].drift_ratio is None  # nothing was appended since
    store.close()


@pytest.mark.parametrize("factor", [1, 3, 8])
def test_keys_coded_before_rope_do_not_drift(factor):
    store, seq, keys = growing("rope", factor)
    stale = recall(seq, keys)
    assert seq._indexes[0].drift_ratio < 1.3
    seq.reindex()
    assert stale > recall(seq, keys) - 0.05
    store.close()


# ---- in the background ----


def test_the_old_index_serves_until_the_new_one_is_done_and_taken():
    store, seq, _, worker = by_hand()
    old = indexes(seq)
    append(seq, [(5 + keys, values) for keys, values in make_rows(SCHEMA, 50, seed=1)])
    seq.reindex(background=True)
    fill(seq, 20, seed=2)
    assert indexes(seq) == old
    assert_serves(store, seq)
    worker.run()
    assert indexes(seq) == old  # only the thread that owns the sequence changes it
    fill(seq, 20, seed=3)
    assert not set(map(id, indexes(seq))) & set(map(id, old))
    assert_serves(store, seq)
    assert store.stats().index_builds == 4


def test_the_result_is_that_of_a_reindex_in_the_foreground():
    store, seq, _, worker = by_hand()
    fill(seq, 50, seed=1)
    twin = seq.fork("twin")
    seq.reindex(background=True)
    worker.run()
    store.wait()
    twin.reindex()
    for a, b in zip(indexes(seq), indexes(twin), strict=True):
        assert np.array_equal(a.codes, b.codes)
        assert np.array_equal(a.codebook.centroids, b.codebook.centroids)
    assert same_bits(seq.attend(0, make_query(SCHEMA, 0)), twin.attend(0, make_query(SCHEMA, 0)))


def test_rows_of_an_open_step_stay_out():
    store, seq, _, worker = by_hand()
    seq.reindex(background=True)
    worker.run()
    rows = make_rows(SCHEMA, 30, seed=1)
    with seq.step():
        seq.append(0, *rows[0])
        store.wait()
        assert seq._indexes[0].covered == (2, 142)
        seq.append(1, *rows[1])
    assert_serves(store, seq)


def test_one_layer_only_and_a_second_call_replaces_the_first():
    _store, seq, _, worker = by_hand()
    old = indexes(seq)
    seq.reindex(1, background=True)
    seq.reindex(1, background=True)
    assert len(worker.queue) == 2
    worker.run()
    fill(seq, 10, seed=1)
    assert indexes(seq)[0] is old[0]
    assert indexes(seq)[1] is not old[1]


@pytest.mark.parametrize("when", ["waiting", "done"])
@pytest.mark.parametrize("keep", [0, 100, 149])
def test_a_truncate_drops_the_result(when, keep):
    store, seq, _, worker = by_hand()
    old = indexes(seq)
    seq.reindex(background=True)
    if when == "done":
        worker.run()
    seq.truncate(keep)
    fill(seq, 180 - keep, seed=1)  # other rows where those were
    worker.run()
    fill(seq, 30, seed=2)
    store.wait()
    assert indexes(seq) == old
    assert_serves(store, seq)


def test_a_truncate_behind_what_was_read_keeps_the_result():
    store, seq, _, worker = by_hand()
    old = indexes(seq)
    seq.reindex(background=True)
    fill(seq, 40, seed=1)
    seq.truncate(160)
    worker.run()
    store.wait()
    assert indexes(seq) != old
    assert_serves(store, seq)


@pytest.mark.parametrize("when", ["waiting", "done"])
def test_a_drop_drops_the_result(when):
    store, seq, _, worker = by_hand()
    seq.reindex(background=True)
    if when == "done":
        worker.run()
    store.drop("book")
    fill(store.create("book"), 150, seed=1)
    worker.run()
    store.wait()
    assert_serves(store, store["book"])
    assert store.stats().index_builds == 2


def test_a_fork_does_not_get_its_origins_result():
    store, seq, _, worker = by_hand()
    seq.reindex(background=True)
    child = seq.fork("child")
    old = indexes(child)
    worker.run()
    store.wait()
    assert indexes(child) == old
    assert_serves(store, child)


def test_nothing_is_queued_where_there_is_nothing_to_build():
    for config, n in ((pq_config(), 5), (flat_config(), 100)):
        store, seq, _, worker = by_hand(config, n)
        seq.reindex(background=True)
        assert not worker.queue
        store.wait()


def fail(*_, **__):
    raise MemoryError("no room")


@pytest.mark.parametrize("through", ["step", "wait"])
def test_a_failure_is_raised_once_and_leaves_everything_as_it_was(monkeypatch, through):
    store, seq, rows, worker = by_hand()
    old, q = indexes(seq), make_query(SCHEMA, 0)
    before = seq.attend(0, q)
    seq.reindex(0, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(old[0]), "train", fail)
        worker.run()
    assert same_bits(seq.attend(0, q), before)
    with pytest.raises(MaintenanceError, match="no room") as caught:
        store.wait() if through == "wait" else seq.begin_step()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not seq.step_open
    assert indexes(seq) == old
    assert same_bits(seq.read(1)[0], rows[1][0])
    store.wait()
    fill(seq, 20, seed=1)
    assert_serves(store, seq)


def test_a_failure_during_a_step_waits_for_the_next(monkeypatch):
    _store, seq, _, worker = by_hand()
    seq.reindex(0, background=True)
    rows = make_rows(SCHEMA, 20, seed=1)
    with seq.step():
        seq.append(0, *rows[0])
        with monkeypatch.context() as patch:
            patch.setattr(type(indexes(seq)[0]), "train", fail)
            worker.run()
        seq.append(1, *rows[1])
    assert len(seq) == 170
    with pytest.raises(MaintenanceError):
        seq.begin_step()
    fill(seq, 1, seed=2)


def test_waiting_gives_up_after_its_time():
    store, seq, _, worker = by_hand()
    old = indexes(seq)
    seq.reindex(background=True)
    with pytest.raises(TimeoutError):
        store.wait(timeout_s=0)
    worker.run()
    store.wait(timeout_s=0)
    assert indexes(seq) != old


# ---- by itself ----


def drifting(threshold, codebook="sequence", n=400):
    index = IndexConfig("pq", {"m": 2, "bits": 4}, min_rows=24, append_rows=8, codebook=codebook, codebook_rows=24,
                        reindex_drift=threshold)  # fmt: skip
    store, seq, _, worker = by_hand(flat_config(index=index))
    rows = [(6 + keys, values) for keys, values in make_rows(SCHEMA, n, seed=1)]
    for at in range(0, n, 20):
        append(seq, cut(rows, at, at + 20))
    return store, seq, worker


def test_a_table_that_drifts_is_trained_again_by_itself():
    store, seq, worker = drifting(1.5)
    assert len(worker.queue) == 2
    before = store.stats().drift
    rows = [(6 + keys, values) for keys, values in make_rows(SCHEMA, 600, seed=5)]
    for at in range(0, 600, 20):
        worker.run()
        append(seq, cut(rows, at, at + 20))
    assert not worker.queue
    assert store.stats().index_builds >= 4
    assert store.stats().drift < 1.5 < 2 < before
    assert_serves(store, seq)


@pytest.mark.parametrize(("threshold", "codebook"), [(None, "sequence"), (100.0, "sequence"), (1.5, "model")])
def test_a_table_is_left_alone_where_the_settings_say_so(threshold, codebook):
    store, _seq, worker = drifting(threshold, codebook)
    assert not worker.queue
    assert store.stats().drift > 2


def test_after_a_failure_it_is_tried_again_only_when_the_table_has_grown(monkeypatch):
    _store, seq, worker = drifting(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(type(indexes(seq)[0]), "train", fail)
        worker.run()
    for _ in range(2):  # one of each layer
        with pytest.raises(MaintenanceError):
            seq.begin_step()
    rows = [(6 + keys, values) for keys, values in make_rows(SCHEMA, 120, seed=3)]
    append(seq, cut(rows, 0, 40))
    assert not worker.queue
    append(seq, cut(rows, 40, 120))
    assert len(worker.queue) == 2


# ---- the thread ----


def test_a_store_has_no_thread_until_it_needs_one_and_none_when_closed():
    before = threading.active_count()
    store, seq, _ = filled(SCHEMA, pq_config(), 150)
    seq.reindex()
    assert threading.active_count() == before
    assert store.maintenance.executor is None
    seq.reindex(background=True)
    store.wait()
    assert threading.active_count() == before + 1
    assert_serves(store, seq)
    store.close()
    assert threading.active_count() == before


def test_closing_waits_for_what_runs_and_drops_what_waits():
    store, seq, _ = filled(SCHEMA, pq_config(), 150)
    entered, leave = threading.Event(), threading.Event()
    index_type = type(indexes(seq)[0])
    real, trained = index_type.train, []

    def held(self, *arguments):
        entered.set()
        assert leave.wait(60)
        trained.append(self)
        return real(self, *arguments)

    index_type.train = held
    try:
        seq.reindex(background=True)
        assert entered.wait(60)
        closing = threading.Thread(target=store.close)
        closing.start()
        leave.set()
        closing.join(60)
    finally:
        index_type.train = real
    assert not closing.is_alive()
    assert len(trained) == 1  # the other layer had not begun
    with pytest.raises(StoreClosedError):
        store.wait()
    store.close()


def test_rows_are_appended_and_dropped_while_the_thread_works():
    """Whatever the order is, the store stays right."""
    store = KVStore(SCHEMA, pq_config())
    for i in range(12):
        seq = store.create(f"s{i}")
        fill(seq, 120 + i, seed=i)
        seq.reindex(background=True)
        fill(seq, 30, seed=50 + i)
        if i % 3 == 0:
            store.drop(f"s{i}")
        elif i % 3 == 1:
            seq.truncate(60)
            fill(seq, 60, seed=80 + i)
    store.wait()
    store._check()
    for name in store:
        assert_serves(store, store[name])
    store.close()
