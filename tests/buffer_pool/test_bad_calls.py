"""Every bad input raises one error of its own kind, says what to do, and changes nothing."""

import math

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


def refuses(pool, call, error, match=None):
    """Check that the call raises, and that the pool is as it was."""
    before = everything(pool)
    with pytest.raises(error, match=match):
        call()
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
        refuses(pool, call, InvalidBatchError, "block ids must be")


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
        refuses(pool, call, InvalidBatchError, "must be")


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
        refuses(pool, call, FrameStateError, "frames must be")


def test_frames_in_another_state():
    pool = full_pool(4)
    pool.drop([13])
    [reserved] = pool.reserve(2, protected=pool.lookup([11, 12]))[1:]
    [held_frame], [free] = pool.lookup([12]), [3]
    pool.abort([free])
    for frame in (free, reserved):
        refuses(pool, lambda frame=frame: pool.touch([frame]), FrameStateError, f"frame {frame} holds no block")
        refuses(pool, lambda frame=frame: pool.pin([held_frame, frame]), FrameStateError, "cannot be pinned")
    for frame in (free, held_frame):
        refuses(pool, lambda frame=frame: pool.abort([frame]), FrameStateError, f"frame {frame} is not reserved")
        refuses(pool, lambda frame=frame: pool.commit([20], [frame]), FrameStateError, "is not reserved")
    refuses(pool, lambda: pool.abort([reserved, reserved]), FrameStateError, "differ from each other")
    refuses(pool, lambda: pool.commit([20, 21], [reserved, reserved]), FrameStateError, "differ from each other")


def test_commits_that_do_not_fit():
    pool = full_pool(4)
    reserved = pool.reserve(2)
    refuses(pool, lambda: pool.commit([20], reserved), InvalidBatchError, "1 blocks cannot be committed to 2 frames")
    refuses(pool, lambda: pool.commit([20, 20], reserved), InvalidBatchError, "differ from each other: 2 ids, 1 blocks")
    refuses(pool, lambda: pool.commit([20, 13], reserved), InvalidBatchError, "block 13 is resident already")
    refuses(pool, lambda: pool.commit([20, 21], [*reserved, -1]), FrameStateError, "frames must be")


def test_admissions_that_do_not_fit():
    pool = full_pool(4)
    refuses(pool, lambda: pool.admit([20, 20], [1, 1], load), InvalidBatchError, "differ from each other")
    refuses(pool, lambda: pool.admit([20, 21], [1], load), InvalidBatchError, "counts must be one number or as many")


@pytest.mark.parametrize("n", [-1, 1.5, "2"])
def test_sizes_of_reservations_and_admissions(n):
    pool = full_pool(4)
    refuses(pool, lambda: pool.admit([20], [1], load, limit=n), InvalidBatchError, "limit must be")
    refuses(pool, lambda: pool.reserve(n), InvalidBatchError, "n must be")


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
