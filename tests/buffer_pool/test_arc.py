"""Narrated as [recent | frequent] ghosts (recent | frequent) target, the oldest first; block = 100 + frame at first."""

import numpy as np

from kvstore.buffer_pool.arc import ARC
from tests.contracts.policy import PolicyContract, evict, frames, insert, touch, weights


class TestARC(PolicyContract):
    make = ARC


def ghosts(policy):
    return list(policy._recent_ghosts), list(policy._frequent_ghosts)


def test_blocks_used_once_go_before_blocks_used_again():
    policy = ARC(4)
    insert(policy, 0, 1, 2, 3)  # [100 101 102 103 |]
    touch(policy, 0, 2)  # [101 103 | 100 102]
    assert evict(policy, 1, 0, 1, 2, 3) == [1]  # [103 | 100 102] (101 |)
    assert ghosts(policy) == ([101], [])
    assert evict(policy, 2, 0, 2, 3) == [3, 0]  # the two that come will be recent: one of them may go again, then 100
    assert ghosts(policy) == ([101, 103], [100])


def test_a_block_that_returns_is_frequent_and_raises_the_target_of_recent_ones():
    policy = ARC(3)
    insert(policy, 0, 1, 2)
    touch(policy, 2)  # [100 101 | 102]
    assert evict(policy, 1, 0, 1, 2) == [0]  # [101 | 102] (100 |)
    insert(policy, 0)  # [101 | 102 100] target 1
    assert policy._target == 1
    assert ghosts(policy) == ([], [])
    assert evict(policy, 1, 0, 1, 2) == [2]  # one recent frame is the target: a frequent one goes
    assert ghosts(policy) == ([], [102])


def test_a_frequent_block_that_returns_lowers_it():
    policy = ARC(3)
    insert(policy, 0, 1, 2)
    touch(policy, 0, 1, 2)  # [| 100 101 102]
    policy._target = 2.0
    assert evict(policy, 1, 0, 1, 2) == [0]  # [| 101 102] (| 100)
    insert(policy, 0)  # [| 101 102 100]
    assert policy._target == 1
    assert policy._frequent[0]


def test_a_scan_leaves_what_is_frequent():
    policy = ARC(8)
    insert(policy, *range(8))
    touch(policy, 0, 1, 2, 3)
    for number in range(20):
        chosen = policy.victims(2, np.ones(8, np.bool_))
        assert set(chosen.tolist()) <= {4, 5, 6, 7}
        policy.insert(chosen, 1000 + 2 * number + frames(0, 1), weights(2))
        policy._check(np.ones(8, np.bool_))


def test_a_block_that_was_removed_leaves_no_ghost():
    policy = ARC(2)
    insert(policy, 0, 1)
    policy.remove(frames(0))
    assert ghosts(policy) == ([], [])


def test_one_block_at_a_time_it_is_the_textbooks_lists():
    for seed in range(6):
        random = np.random.default_rng(seed)
        trace = np.concatenate([random.zipf(1.3, 300) % 40, np.arange(60), random.zipf(1.2, 300) % 50]).tolist()
        assert hits_of(ARC(10), trace) == hits_of_lists(10, trace)


def hits_of(policy, trace):
    home, hits = {}, []
    for block in trace:
        hits.append(block in home)
        if block in home:
            touch(policy, home[block])
            continue
        frame = len(home)
        if frame == policy.n_frames:
            [frame] = evict(policy, 1, *range(policy.n_frames))
            del home[next(old for old, at in home.items() if at == frame)]
        insert(policy, frame, first_id=block - frame)
        home[block] = frame
        policy._check(np.arange(policy.n_frames) < len(home))
    return hits


def hits_of_lists(size, trace):
    """ARC with four lists, the target moved after a victim is chosen instead of before."""
    recent, frequent, recent_ghosts, frequent_ghosts, target, hits = [], [], [], [], 0.0, []
    for block in trace:
        hits.append(block in recent or block in frequent)
        if hits[-1]:
            (recent if block in recent else frequent).remove(block)
            frequent.append(block)
            continue
        if len(recent) + len(frequent) == size:
            if recent and (len(recent) > target or not frequent):
                recent_ghosts.append(recent.pop(0))
            else:
                frequent_ghosts.append(frequent.pop(0))
        if block in recent_ghosts:
            target = min(size, target + max(1, len(frequent_ghosts) / len(recent_ghosts)))
            recent_ghosts.remove(block)
            frequent.append(block)
        elif block in frequent_ghosts:
            target = max(0, target - max(1, len(recent_ghosts) / len(frequent_ghosts)))
            frequent_ghosts.remove(block)
            frequent.append(block)
        else:
            recent.append(block)
        del recent_ghosts[: max(0, len(recent) + len(recent_ghosts) - size)]
        everything = len(recent) + len(frequent) + len(recent_ghosts) + len(frequent_ghosts)
        del frequent_ghosts[: max(0, everything - 2 * size)]
    return hits
