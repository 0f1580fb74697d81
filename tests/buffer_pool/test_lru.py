from kvstore.buffer_pool.lru import LRU
from tests.contracts.policy import PolicyContract, evict, insert, touch


class TestLRU(PolicyContract):
    make = LRU


def test_the_oldest_goes_first():
    policy = LRU(4)
    insert(policy, 0, 1, 2, 3)  # oldest first: 0 1 2 3
    touch(policy, 1, 0)  # 2 3 1 0
    assert evict(policy, 3, 0, 1, 2, 3) == [2, 3, 1]
    insert(policy, 3, 2)  # 0 3 2
    assert evict(policy, 2, 0, 2, 3) == [0, 3]


def test_the_last_of_a_batch_is_the_most_recent_and_the_last_mention_counts():
    policy = LRU(3)
    insert(policy, 0, 1, 2)
    touch(policy, 2, 0, 1, 2)  # 0 1 2
    assert evict(policy, 2, 0, 1, 2) == [0, 1]


def test_the_oldest_is_passed_by_while_it_is_not_evictable():
    policy = LRU(3)
    insert(policy, 0, 1, 2)
    assert evict(policy, 1, 1, 2) == [1]
    assert evict(policy, 1, 0, 2) == [0]
