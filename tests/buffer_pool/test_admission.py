import pytest
import torch

from kvstore.buffer_pool import admission_limit
from tests.buffer_pool.builders import Device, content, everything, full_pool, held, load, make_pool

POLICIES = ["lru", "lfu", "clock", "score-decay", "arc"]


class FaultError(Exception):
    """What a tier raises."""


def failing_at(n):
    """A load that writes half of the n-th block, and raises."""
    calls = []

    def fault(block, frame):
        calls.append(block)
        if len(calls) > n:
            frame[: len(frame) // 2] = 3
            raise FaultError
        load(block, frame)

    return fault


def test_the_blocks_that_hold_most_are_let_in():
    pool = make_pool(4, admit_blocks=2)
    assert pool.admit([1, 2, 3, 4], [5, 20, 1, 10], load).tolist() == [2, 4]
    pool._check()
    assert held(pool) == [2, 4]


def test_a_call_may_set_itself_a_lower_limit():
    pool = make_pool(4, admit_blocks=2)
    assert pool.admit([1, 2, 3, 4], [5, 20, 1, 10], load, limit=1).tolist() == [2]
    assert pool.admit([1, 2, 3, 4], [5, 20, 1, 10], load, limit=0).tolist() == []
    assert pool.admit([1, 2, 3, 4], [5, 20, 1, 10], load, limit=9).tolist() == [4]


def test_the_limit_is_three_quarters_of_the_frames_for_all_batches_of_a_step():
    assert admission_limit(384, 30) == 9
    assert admission_limit(400, 1) == 300
    assert admission_limit(10, 30) == 1
    assert admission_limit(0, 30) == 0


def test_lru_finds_nothing_where_a_step_lets_in_more_than_fits_and_much_within_the_limit():
    """What the limit is for: each of 10 layers wants the same 8 blocks at every step, and 40 of the 80 fit."""
    found = {}
    for limit in (admission_limit(40, 10), 5):
        pool = make_pool(40, debug=False)
        for _ in range(6):
            for layer in range(10):
                ids = range(8 * layer, 8 * layer + 8)
                pool.lookup(ids)
                pool.admit(ids, range(8), load, limit=limit)
        found[limit] = pool.counters.hits
    assert found == {3: 10 * 3 * 5, 5: 0}


def test_among_equals_the_earlier():
    pool = make_pool(4, admit_blocks=2)
    assert pool.admit([9, 3, 7], [5, 5, 5], load).tolist() == [9, 3]


def test_blocks_that_hold_nothing_are_not_let_in():
    pool = make_pool(4)
    assert pool.admit([1, 2], [0, 3], load).tolist() == [2]
    assert pool.admit([], [], load).tolist() == []


def test_never_more_than_there_are_frames():
    pool = make_pool(3, admit_blocks=100)
    assert pool.admit(range(50), range(50), load).tolist() == [49, 48, 47]
    assert held(pool) == [47, 48, 49]
    assert pool.counters.evictions == 0


def test_blocks_that_are_there_are_touched_kept_and_not_loaded_again():
    pool = full_pool(3, admit_blocks=2)  # 10 11 12, oldest first
    loaded = []
    admitted = pool.admit([10, 20, 11], [9, 8, 7], lambda block, frame: (loaded.append(block), load(block, frame)))
    assert admitted.tolist() == loaded == [20]  # 10 and 20 are the best two; 11 goes
    assert held(pool) == [10, 12, 20]
    pool.admit([30], [1], load)
    assert held(pool) == [10, 20, 30]


def test_the_best_block_is_the_most_recent():
    pool = make_pool(3)
    pool.admit([1, 2, 3], [5, 9, 7], load)
    for block, left in [(20, [2, 3, 20]), (21, [2, 20, 21]), (22, [20, 21, 22])]:
        pool.admit([block], [1], load)
        assert held(pool) == left


def test_so_it_is_among_blocks_that_are_there():
    pool = full_pool(3)
    pool.admit([11, 12, 10], [3, 9, 5], load)
    for block, left in [(20, [10, 12, 20]), (21, [12, 20, 21])]:
        pool.admit([block], [1], load)
        assert held(pool) == left


def test_pinned_frames_leave_room_for_fewer():
    pool = full_pool(3)
    with pool.pin(pool.lookup([10, 12])):
        assert pool.admit([20, 21], [1, 2], load).tolist() == [21]
    assert held(pool) == [10, 12, 21]
    assert pool.counters.stalls == 1


def test_reserved_frames_are_left_alone():
    pool = full_pool(3)
    frames = pool.reserve(2)
    assert pool.admit([20, 21], [1, 2], load).tolist() == [21]
    pool.abort(frames)
    pool._check()


def test_frames_that_the_device_may_still_read_are_left_alone():
    device = Device()
    pool = full_pool(2, record_event=device.record)
    pool.pin(pool.lookup([10, 11])).release()
    assert pool.admit([20], [1], load).tolist() == []
    device.finish()
    assert pool.admit([20], [1], load).tolist() == [20]


def test_none_are_let_in_where_admission_is_off():
    pool = make_pool(3, admit_blocks=0)
    assert pool.admit([1], [1], load).tolist() == []
    assert pool.stats().allocated_bytes == 3 * 128 + 64, "no staging"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", range(4))
def test_a_load_that_fails_leaves_the_pool_as_it_was(policy, n):
    pool = full_pool(6, policy=policy)
    pool.drop([11])
    pool.touch(pool.lookup([12, 10, 14]))
    before = everything(pool)
    with pytest.raises(FaultError):
        pool.admit([12, 20, 21, 22, 23, 10], [9, 8, 7, 6, 5, 4], failing_at(n))
    pool._check()
    assert everything(pool) == before
    assert len(pool.admit([12, 20, 21, 22, 23, 10], [9, 8, 7, 6, 5, 4], failing_at(4))) == 4
    pool._check()
    assert held(pool)


def test_a_copy_that_fails_frees_the_frames(monkeypatch):
    pool = full_pool(3)

    def broken(frames, rows):
        raise FaultError

    monkeypatch.setattr(pool._memory, "write", broken)
    with pytest.raises(FaultError):
        pool.admit([20, 21], [1, 2], load)
    monkeypatch.undo()
    pool._poison(pool._residency.states.free_frames())
    pool._check()
    assert held(pool) == [12]


def test_in_debug_mode_what_load_does_not_write_is_nan():
    pool = make_pool(2)
    pool.admit([1], [1], load)
    pool.admit([2], [1], lambda block, frame: frame[:4].fill_(0))
    frame = pool.frames[pool.lookup([2])[0]]
    assert frame[:4].tolist() == [0] * 4
    assert (frame[4:] == 0xFF).all()


def test_staging_begins_at_cache_lines_too():
    pool, addresses = make_pool(3), []
    pool.admit([1, 2, 3], [1, 1, 1], lambda block, frame: addresses.append(frame.data_ptr()))
    assert all(address % 64 == 0 for address in addresses)
    assert pool.stats().allocated_bytes == 2 * (3 * 128 + 64)


def test_bytes_arrive():
    pool = make_pool(5)
    pool.admit([3, 1, 2], [1, 2, 3], load)
    for block in (1, 2, 3):
        assert torch.equal(pool.frames[pool.lookup([block])[0]], content(block))
