import math

import pytest

from kvstore.buffer_pool.lfu import LFU
from kvstore.errors import ConfigError
from tests.contracts.policy import PolicyContract, evict, frames, insert, touch


class TestLFU(PolicyContract):
    make = LFU


class TestLFUWithoutAgeing(PolicyContract):
    def make(self, n_frames):
        return LFU(n_frames, half_life=math.inf)


def test_the_least_used_goes_first_and_among_equals_the_oldest():
    policy = LFU(4, half_life=math.inf)
    insert(policy, 0, 1, 2, 3)  # uses: 1 1 1 1
    touch(policy, 1, 0, 1)  # 2 3 1 1
    touch(policy, 2)  # 2 3 2 1
    assert evict(policy, 3, 0, 1, 2, 3) == [3, 0, 2]


def test_weights_count_for_nothing():
    policy = LFU(2, half_life=math.inf)
    insert(policy, 0, 1)
    policy.touch(frames(0, 1, 1), frames(90, 1, 1).astype(float))
    assert evict(policy, 1, 0, 1) == [0]


def test_without_ageing_yesterdays_topic_stays():
    policy = LFU(3, half_life=math.inf)
    insert(policy, 0, 1, 2)
    touch(policy, *[0] * 50)
    touch(policy, *[1, 2] * 49)
    assert evict(policy, 1, 0, 1, 2) == [1]
    insert(policy, 1)
    assert evict(policy, 1, 0, 1, 2) == [1]


def test_with_ageing_it_goes():
    policy = LFU(3, half_life=4)  # a use counts half after 12 others
    insert(policy, 0, 1, 2)
    touch(policy, *[0] * 50)
    for _ in range(49):
        touch(policy, 1, 2)
    assert evict(policy, 1, 0, 1, 2) == [0]


def test_a_use_counts_half_after_its_half_life():
    policy = LFU(2, half_life=5)
    insert(policy, 0)
    touch(policy, 0)  # the ten uses from here on make a half life
    insert(policy, 1)
    for _ in range(8):
        touch(policy, 1)
    assert policy._sums[0] / policy._unit == pytest.approx(0.5**1.1 + 0.5)


def test_counts_stay_finite_for_ever():
    policy = LFU(2, half_life=0.01)
    insert(policy, 0, 1)
    for _ in range(100):
        touch(policy, *[0, 1] * 10)
        policy._check(frames(1, 1).astype(bool))
    touch(policy, 0)
    assert evict(policy, 1, 0, 1) == [1]


@pytest.mark.parametrize("half_life", [0, -1, math.nan])
def test_a_half_life_is_positive(half_life):
    with pytest.raises(ConfigError, match="half_life must be above 0"):
        LFU(2, half_life=half_life)
