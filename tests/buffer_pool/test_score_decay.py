import math

import numpy as np

from kvstore.buffer_pool.score_decay import ScoreDecay
from tests.contracts.policy import PolicyContract, evict, frames, insert


class TestScoreDecay(PolicyContract):
    make = ScoreDecay


def test_the_least_attention_goes_first():
    policy = ScoreDecay(3, half_life=math.inf)
    policy.insert(frames(0, 1, 2), frames(100, 101, 102), np.array([0.5, 0.1, 0.2]))  # .5 .1 .2
    policy.touch(frames(1, 1), np.array([0.3, 0.3]))  # .5 .7 .2
    assert evict(policy, 3, 0, 1, 2) == [2, 0, 1]


def test_attention_of_long_ago_counts_less():
    policy = ScoreDecay(2, half_life=1)  # half after two uses
    policy.insert(frames(0), frames(100), np.array([8.0]))
    for _ in range(6):
        policy.touch(frames(0), np.array([0.0]))  # 8 becomes 1
    policy.insert(frames(1), frames(101), np.array([1.5]))
    assert evict(policy, 1, 0, 1) == [0]


def test_a_frame_begins_anew_with_another_block():
    policy = ScoreDecay(2, half_life=math.inf)
    policy.insert(frames(0, 1), frames(100, 101), np.array([9.0, 1.0]))
    assert evict(policy, 1, 0) == [0]
    insert(policy, 0)
    policy.touch(frames(1), np.array([0.5]))
    assert evict(policy, 1, 0, 1) == [0]
