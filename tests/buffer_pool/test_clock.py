from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffer_pool.clock import Clock
from tests.contracts.policy import PolicyContract, evict, insert, only, touch


class TestClock(PolicyContract):
    make = Clock


def test_the_hand_clears_bits_on_its_first_round_and_takes_on_its_second():
    policy = Clock(4)
    insert(policy, 0, 1, 2, 3)  # hand >0* 1* 2* 3*
    assert evict(policy, 1, 0, 1, 2, 3) == [0]  # _ >1 2 3
    touch(policy, 1)  # _ >1* 2 3
    assert evict(policy, 1, 1, 2, 3) == [2]  # _ 1 _ >3
    insert(policy, 0)  # 0* 1 _ >3
    assert evict(policy, 2, 0, 1, 3) == [3, 1]  # 0 _ >_ _


def test_a_frame_that_is_not_evictable_keeps_its_bit():
    policy = Clock(3)
    insert(policy, 0, 1, 2)  # >0* 1* 2*
    assert evict(policy, 1, 1, 2) == [1]  # 0* _ >2
    assert evict(policy, 1, 0, 2) == [2]  # >0* _ _
    insert(policy, 1, 2)  # >0* 1* 2*
    touch(policy, 1)
    assert evict(policy, 2, 0, 1, 2) == [0, 1]


def walking_hand(hand, used, evictable, n):
    """The textbook's loop, a frame at a time."""
    chosen = []
    for _ in range(2 * len(used) + 1):
        if len(chosen) == n:
            return chosen, hand
        if evictable[hand] and hand not in chosen:
            if used[hand]:
                used[hand] = False
            else:
                chosen.append(hand)
        hand = (hand + 1) % len(used)
    raise AssertionError("the hand went round more than twice")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9), st.integers(0, 8), st.data())
def test_whole_rounds_at_once_give_what_a_hand_that_walks_gives(bits, hand, data):
    policy = Clock(len(bits))
    insert(policy, *range(len(bits)))
    used, evictable = [list(column) for column in zip(*bits, strict=True)]
    policy._used[:], policy._hand = used, hand % len(bits)
    n = data.draw(st.integers(0, sum(evictable)))
    chosen, stop = walking_hand(policy._hand, used, evictable, n)
    assert policy.victims(n, only(*[i for i, e in enumerate(evictable) if e], n_frames=len(bits))).tolist() == chosen
    assert policy._hand == stop
    assert [used[i] for i in range(len(bits)) if i not in chosen] == [
        bool(policy._used[i]) for i in range(len(bits)) if i not in chosen
    ]
