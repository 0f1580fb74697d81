"""Every bad input raises one error of its own kind, says what to do, and changes nothing."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvstore.buffer_pool import (
    BufferPool,
    BufferPoolError,
    FrameMemoryError,
    FramePinnedError,
    FrameStateError,
    GuardReleasedError,
    InvalidBatchError,
    PoolClosedError,
)
from kvstore.errors import ConfigError, KVStoreError
from tests.buffer_pool.builders import everything, full_pool, load

BAD_IDS = [
    [[1, 2]],
    3,
    [1.0, 2.0],
    ["a"],
    [True, False],
    [2**63],
    np.array([1], np.uint64),
    [[1], [2, 3]],
    torch.tensor([1.5]),
    None,
]
BAD_WEIGHTS = [
    [1.0],
    [1.0, 2.0, 3.0],
    [1.0, -0.1],
    [1.0, math.nan],
    [math.inf, 1.0],
    -1.0,
    [[1.0, 1.0]],
    ["x", 1.0],
    None,
]


@contextmanager
def unchanged(pool):
    """Check that the pool is as it was after what is refused inside."""
    before = everything(pool)
    yield
    pool._check()
    assert everything(pool) == before


@pytest.mark.parametrize("ids", BAD_IDS, ids=repr)
def test_ids(ids):
    pool = full_pool(3)
    reserved = pool.reserve(1)
    calls = [
        lambda: pool.lookup(ids),
        lambda: pool.drop(ids),
        lambda: pool.admit(ids, 1.0, load),
        lambda: pool.commit(ids, reserved),
    ]
    for call in calls:
        with unchanged(pool), pytest.raises(InvalidBatchError, match="block ids must be"):
            call()


@pytest.mark.parametrize("weights", BAD_WEIGHTS, ids=repr)
def test_weights(weights):
    pool = full_pool(4)
    found, reserved = pool.lookup([12, 13]), pool.reserve(2)
    calls = [
        lambda: pool.touch(found, weights),
        lambda: pool.commit([20, 21], reserved, weights),
        lambda: pool.admit([20, 21], weights, load),
    ]
    for call in calls:
        with unchanged(pool), pytest.raises(InvalidBatchError, match="must be"):
            call()


@pytest.mark.parametrize("frames", [[4], [-2], [0, 99], [0.5], [[0]], ["a"], [True], None], ids=repr)
def test_frames_that_do_not_exist(frames):
    pool = full_pool(4)
    calls = [
        lambda: pool.touch(frames),
        lambda: pool.pin(frames),
        lambda: pool.abort(frames),
        lambda: pool.reserve(1, protected=frames),
        lambda: pool.commit([20], frames),
    ]
    for call in calls:
        with unchanged(pool), pytest.raises(FrameStateError, match="frames must be"):
            call()


def test_frames_in_another_state():
    pool = full_pool(4)
    pool.drop([13])
    [reserved] = pool.reserve(2, protected=pool.lookup([11, 12]))[1:]
    [held_frame], [free] = pool.lookup([12]), [3]
    pool.abort([free])
    for frame in (free, reserved):
        with unchanged(pool), pytest.raises(FrameStateError, match=f"frame {frame} holds no block"):
            pool.touch([frame])
        with unchanged(pool), pytest.raises(FrameStateError, match="cannot be pinned"):
            pool.pin([held_frame, frame])
    for frame in (free, held_frame):
        with unchanged(pool), pytest.raises(FrameStateError, match=f"frame {frame} is not reserved"):
            pool.abort([frame])
        with unchanged(pool), pytest.raises(FrameStateError, match="is not reserved"):
            pool.commit([20], [frame])
    with unchanged(pool), pytest.raises(FrameStateError, match="differ from each other"):
        pool.abort([reserved, reserved])
    with unchanged(pool), pytest.raises(FrameStateError, match="differ from each other"):
        pool.commit([20, 21], [reserved, reserved])


def test_commits_that_do_not_fit():
    pool = full_pool(4)
    reserved = pool.reserve(2)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="1 blocks cannot be committed to 2 frames"):
        pool.commit([20], reserved)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="differ from each other: 2 ids, 1 blocks"):
        pool.commit([20, 20], reserved)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="block 13 is resident already"):
        pool.commit([20, 13], reserved)
    with unchanged(pool), pytest.raises(FrameStateError, match="frames must be"):
        pool.commit([20, 21], [*reserved, -1])


def test_admissions_that_do_not_fit():
    pool = full_pool(4)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="differ from each other"):
        pool.admit([20, 20], [1, 1], load)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="counts must be one number or as many"):
        pool.admit([20, 21], [1], load)


@pytest.mark.parametrize("n", [-1, 1.5, "2"])
def test_sizes_of_reservations_and_admissions(n):
    pool = full_pool(4)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="limit must be"):
        pool.admit([20], [1], load, limit=n)
    with unchanged(pool), pytest.raises(InvalidBatchError, match="n must be"):
        pool.reserve(n)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"n_frames": -1}, "n_frames must be at least 0, not -1"),
        ({"n_frames": 2.5}, "n_frames must be a whole number"),
        ({"frame_bytes": 0}, "frame_bytes must be at least 1"),
        ({"admit_blocks": -1}, "admit_blocks must be at least 0"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"device": 1.5}, "no device 1.5"),
        ({"policy": "mru"}, "unknown replacement policy 'mru'"),
        ({"policy": "lfu", "policy_options": {"half_life": -1}}, "half_life must be above 0"),
        ({"policy": "lfu", "policy_options": {"half_life": "long"}}, "cannot be made with the settings"),
    ],
)
def test_settings(settings, match):
    with pytest.raises(ConfigError, match=match):
        BufferPool(**{"n_frames": 2, "frame_bytes": 64, **settings})


def test_memory_that_is_not_there():
    with pytest.raises(FrameMemoryError, match=r"cpu cannot give .* bytes to a buffer pool; take fewer frames"):
        BufferPool(1 << 30, 1 << 30)


def test_errors_are_caught_as_what_they_are():
    for error, builtin in [
        (InvalidBatchError, ValueError),
        (FrameStateError, ValueError),
        (FrameMemoryError, MemoryError),
        (FramePinnedError, RuntimeError),
        (GuardReleasedError, RuntimeError),
        (PoolClosedError, RuntimeError),
    ]:
        assert issubclass(error, (BufferPoolError, builtin))
        assert issubclass(error, builtin)
        assert issubclass(error, KVStoreError)
