import numpy as np
import pytest
import torch

from kvstore.buffer_pool import BufferPool, FramePinnedError, PoolClosedError
from tests.buffer_pool.builders import FRAME_BYTES, content, everything, full_pool, held, load, make_pool, put


def test_a_new_pool_is_empty():
    pool = make_pool(5)
    pool._check()
    assert len(pool) == 0
    assert pool.lookup([1, 2]).tolist() == [-1, -1]
    assert pool.resident().tolist() == []
    stats = pool.stats()
    assert (stats.free_frames, stats.resident_blocks, stats.n_frames) == (5, 0, 5)


def test_blocks_are_visible_once_they_are_committed_and_not_before():
    pool = make_pool(4)
    frames = pool.reserve(3)
    for frame, block in zip(frames.tolist(), (7, 8, 9), strict=True):
        load(block, pool.frames[frame])
    pool._check()
    assert pool.lookup([7, 8, 9]).tolist() == [-1, -1, -1]
    pool.commit([7, 8, 9], frames)
    pool._check()
    assert pool.lookup([9, 7, 5, 9]).tolist() == [frames[2], frames[0], -1, frames[2]]
    assert held(pool) == [7, 8, 9]
    assert 7 in pool
    assert 5 not in pool


def test_part_of_a_reservation_may_be_committed_and_the_rest_freed():
    pool = make_pool(4)
    frames = pool.reserve(3)
    load(7, pool.frames[frames[1]])
    pool.commit([7], frames[1:2])
    pool.abort(frames[[0, 2]])
    pool._check()
    assert held(pool) == [7]
    assert pool.stats().free_frames == 3


def test_free_frames_are_used_before_anything_is_evicted():
    pool = full_pool(4)
    pool.drop([12])
    put(pool, 20)
    assert held(pool) == [10, 11, 13, 20]
    put(pool, 21)
    assert held(pool) == [11, 13, 20, 21]
    assert pool.counters.evictions == 1


def test_a_reservation_is_whole_or_nothing():
    pool = full_pool(4)
    before = everything(pool)
    with pool.pin(pool.lookup([10, 11])):
        assert pool.reserve(3) is None
        assert pool.reserve(2, protected=pool.lookup([12])) is None
        pool._check()
    after = everything(pool)
    assert after.pop("counters") == before.pop("counters") | {"stalls": 2, "pins": 2, "lookups": 3, "hits": 3}
    assert after == before
    assert len(pool.reserve(4)) == 4


def test_more_than_there_are_is_no_error():
    pool = make_pool(2)
    assert pool.reserve(3) is None
    assert pool.reserve(0).tolist() == []
    assert pool.counters.stalls == 1


def test_protected_frames_stay_and_misses_among_them_are_passed_over():
    pool = full_pool(4)
    pool.commit([20, 21], pool.reserve(2, protected=pool.lookup([10, 99, 11])))
    assert pool.resident().tolist() == [10, 11, 20, 21]


def test_touched_blocks_stay_longer():
    pool = full_pool(4)
    pool.touch(pool.lookup([10, 99, 11]))
    put(pool, 20, 21)
    assert held(pool) == [10, 11, 20, 21]


def test_weights_reach_the_policy():
    pool = full_pool(3, policy="score-decay")
    pool.touch(pool.lookup([10, 99, 11, 12]), [5.0, 100.0, 0.5, 3.0])
    put(pool, 20)
    assert held(pool) == [10, 12, 20]
    frames = pool.reserve(1)  # 20, of weight 1
    load(21, pool.frames[frames[0]])
    pool.commit([21], frames, 50.0)
    put(pool, 22)
    assert held(pool) == [10, 21, 22]


def test_dropped_blocks_are_gone_and_their_frames_free():
    pool = full_pool(4)
    assert pool.drop([11, 13, 99, 11]) == 2
    pool._check()
    assert held(pool) == [10, 12]
    assert pool.drop([]) == 0
    assert pool.counters.drops == 2
    put(pool, 13, 11)
    assert held(pool) == [10, 11, 12, 13]


def test_a_dropped_block_that_is_pinned_stays_and_so_do_the_others():
    pool = full_pool(4)
    with pool.pin(pool.lookup([11])):
        before = everything(pool)
        with pytest.raises(FramePinnedError, match="1 of 2 blocks are pinned"):
            pool.drop([10, 11])
        assert everything(pool) == before
    assert pool.drop([10, 11]) == 2


@pytest.mark.parametrize("ids", [[-1, -(2**63), 2**63 - 1], [0, 1 << 62, -5]])
def test_a_block_id_is_any_int64(ids):
    pool = make_pool(3)
    put(pool, *ids)
    assert held(pool) == sorted(ids)
    assert (pool.lookup([*ids, 3]) >= 0).tolist() == [True, True, True, False]
    assert pool.drop(ids) == 3
    assert pool.lookup(ids).tolist() == [-1, -1, -1]


def test_ids_and_frames_may_be_tensors_lists_or_arrays_of_any_integers():
    pool = make_pool(3)
    put(pool, 5, 6)
    for ids in (torch.tensor([5, 7]), [5, 7], (5, 7), np.array([5, 7], np.int32), np.array([5, 7], np.uint16)):
        found = pool.lookup(ids)
        assert found.dtype == np.int64
        pool.touch(torch.from_numpy(found), torch.tensor([1.0, 2.0]))
        pool.pin(found.tolist()).release()


def test_what_a_pool_returns_is_the_callers():
    pool = full_pool(3)
    pool.resident()[:] = 0
    pool.lookup([10, 11])[:] = 2
    frames = pool.reserve(2)
    pool.commit([20, 21], frames)
    frames[:] = 0
    pool._check()
    with pool.pin(pool.lookup([20, 21])) as guard:
        guard.frames[:] = 0
        pool._check()
    pool._check()
    assert (pool.lookup([20, 21]) >= 0).all()
    assert sorted(pool.resident().tolist())[-2:] == [20, 21]


def test_arrays_may_be_reversed_or_read_only():
    pool = make_pool(4)
    for step in (-1, 1):
        frames = pool.reserve(4)[::step]
        frames.flags.writeable = False
        pool.commit(np.arange(4)[::-1], frames)
        pool.touch(frames)
        pool.pin(frames).release()
        pool.drop(np.arange(4)[::-1])
        pool.abort(pool.reserve(4)[::-1])
        pool._check()
        assert len(pool) == 0


# ---- zero frames ----


@pytest.mark.parametrize("policy", ["lru", "lfu", "clock", "score-decay", "arc"])
def test_a_pool_without_frames_never_finds_and_never_holds(policy):
    with make_pool(0, policy=policy) as pool:
        assert pool.frames.shape == (0, FRAME_BYTES)
        assert pool.frame_addresses.shape == (0,)
        assert pool.lookup([1, 2]).tolist() == [-1, -1]
        assert pool.reserve(1) is None
        assert pool.reserve(0).tolist() == []
        pool.commit([], [])
        pool.touch([-1])
        with pool.pin([-1]) as guard:
            assert guard.frames.tolist() == []
        assert pool.admit([1, 2], [3, 4], load).tolist() == []
        assert pool.drop([1]) == 0
        pool._check()


# ---- memory ----


@pytest.mark.parametrize("frame_bytes", [1, 63, 64, 65, 4096])
def test_frames_begin_at_cache_lines_and_do_not_overlap(frame_bytes):
    pool = BufferPool(5, frame_bytes)
    assert pool.frames.shape == (5, frame_bytes)
    assert pool.frames.dtype == torch.uint8
    assert (pool.frame_addresses % 64 == 0).all()
    assert (np.diff(pool.frame_addresses) >= frame_bytes).all()
    assert pool.frame_addresses.tolist() == [pool.frames[i].data_ptr() for i in range(5)]
    for frame in range(5):
        pool.frames[frame] = frame
    assert [pool.frames[frame].unique().tolist() for frame in range(5)] == [[0], [1], [2], [3], [4]]


def test_a_frame_can_be_seen_as_rows():
    pool = BufferPool(3, 2 * 4 * 8 * 2)
    rows = pool.frames[1].view(torch.bfloat16).view(2, 4, 8)
    rows.fill_(1.5)
    assert pool.frames.view(torch.bfloat16)[1].tolist() == [1.5] * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_in_debug_mode_frames_without_a_block_are_nan(dtype):
    pool = full_pool(4)
    pool.drop([11])
    pool.touch(pool.lookup([12, 10]))
    evicted = pool.lookup([13])
    reserved = pool.reserve(2)
    assert evicted[0] in reserved
    assert pool.frames.view(dtype)[reserved].isnan().all()
    for block in (10, 12):
        assert torch.equal(pool.frames[pool.lookup([block])[0]], content(block))
    pool.frames[reserved] = 0
    pool.abort(reserved)
    assert pool.frames.view(dtype)[reserved].isnan().all()
    pool._check()


def test_a_row_of_an_evicted_block_shows_in_debug_mode():
    """Whoever keeps a view beyond its guard reads NaN, not rows of a stranger."""
    pool = make_pool(1)
    frames = pool.reserve(1)
    pool.frames.view(torch.float32)[frames] = 1.0
    pool.commit([1], frames)
    kept = pool.frames.view(torch.float32)[0]
    pool.reserve(1)
    assert kept.isnan().all()


# ---- the end ----


def test_a_closed_pool_says_so_and_closing_twice_is_nothing():
    pool = full_pool(2)
    pool.close()
    pool.close()
    calls = [
        lambda: pool.lookup([1]),
        lambda: pool.reserve(1),
        lambda: pool.commit([1], [0]),
        lambda: pool.abort([0]),
        lambda: pool.touch([0]),
        lambda: pool.pin([0]),
        lambda: pool.drop([1]),
        lambda: pool.admit([1], [1], load),
        pool.resident,
        pool.stats,
        lambda: pool.frames,
        lambda: pool.frame_addresses,
        pool.__enter__,
    ]
    for call in calls:
        with pytest.raises(PoolClosedError, match="closed"):
            call()


def test_counters_tell_what_happened():
    pool = full_pool(3)
    pool.lookup([10, 11, 99, 10])
    put(pool, 20)
    pool.reserve(9)
    pool.drop([20])
    with pool.pin(pool.lookup([11, 12])):
        stats = pool.stats()
    assert stats.as_dict() == {
        "n_frames": 3,
        "free_frames": 1,
        "reserved_frames": 0,
        "resident_blocks": 2,
        "pinned_frames": 2,
        "guards": 1,
        "frame_bytes": FRAME_BYTES,
        "allocated_bytes": 3 * 128 + 64,
        "policy": "LRU",
        "counters": {
            "lookups": 6,
            "hits": 5,
            "misses": 1,
            "admissions": 4,
            "evictions": 1,
            "drops": 1,
            "stalls": 1,
            "pins": 2,
        },
    }
    pool.lookup([10])
    assert stats.counters.lookups == 6, "stats are a copy"
