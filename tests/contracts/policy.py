"""What every replacement policy must do; a test class of a policy inherits it and says how to make one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.buffer_pool.policy import Policy

N_FRAMES = 12


class PolicyContract:
    """Subclasses define `make`."""

    def make(self, n_frames: int) -> Policy:
        raise NotImplementedError

    def filled(self, n: int = N_FRAMES) -> Policy:
        """A policy that follows frames 0 to n - 1 with blocks 100, 101, ..."""
        policy = self.make(N_FRAMES)
        insert(policy, *range(n))
        policy._check(only(*range(n)))
        return policy

    def test_follows_nothing_at_first(self) -> None:
        policy = self.make(N_FRAMES)
        assert policy.n_frames == N_FRAMES
        policy._check(only())

    def test_zero_frames(self) -> None:
        policy = self.make(0)
        policy.insert(*batch())
        policy.touch(frames(), weights(0))
        policy.remove(frames())
        assert len(policy.victims(0, np.zeros(0, np.bool_))) == 0
        policy._check(np.zeros(0, np.bool_))

    @pytest.mark.parametrize("n", [0, 1, 3, 7])
    def test_victims_are_evictable_differ_and_are_followed_no_more(self, n: int) -> None:
        policy, evictable = self.filled(), only(1, 2, 4, 5, 8, 10, 11)
        chosen = policy.victims(n, evictable)
        assert chosen.dtype == np.int64
        assert chosen.shape == (n,)
        assert len(set(chosen.tolist())) == n
        assert evictable[chosen].all()
        policy._check(only(*(set(range(N_FRAMES)) - set(chosen.tolist()))))

    def test_what_is_not_evictable_stays_however_old(self) -> None:
        policy = self.filled()
        for _ in range(3):
            policy.touch(frames(*range(4, N_FRAMES)), weights(N_FRAMES - 4))
        kept = policy.victims(N_FRAMES - 4, only(*range(4, N_FRAMES)))
        assert set(kept.tolist()) == set(range(4, N_FRAMES))
        policy._check(only(0, 1, 2, 3))

    def test_removed_frames_may_be_inserted_again(self) -> None:
        policy = self.filled()
        policy.remove(frames(3, 0))
        policy._check(only(1, 2, *range(4, N_FRAMES)))
        insert(policy, 0)
        policy._check(only(0, 1, 2, *range(4, N_FRAMES)))

    def test_evicted_frames_may_be_inserted_again(self) -> None:
        policy = self.filled()
        for round_number in range(2, 9):
            chosen = policy.victims(5, only(*range(N_FRAMES)))
            policy.insert(chosen, 100 * round_number + chosen, weights(5))
            policy._check(only(*range(N_FRAMES)))

    def test_a_batch_of_touches_may_repeat_frames(self) -> None:
        policy = self.filled()
        policy.touch(frames(2, 2, 5, 2), weights(4))
        policy._check(only(*range(N_FRAMES)))

    def test_weights_of_zero_and_very_large_ones(self) -> None:
        policy = self.filled()
        policy.touch(frames(1, 2), np.array([0.0, 1e12]))
        policy._check(only(*range(N_FRAMES)))
        assert len(policy.victims(N_FRAMES, only(*range(N_FRAMES)))) == N_FRAMES

    def test_the_same_calls_give_the_same_victims(self) -> None:
        assert self.walk(3) == self.walk(3)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_random_walk_keeps_the_invariants(self, seed: int) -> None:
        evictions = self.walk(seed)
        assert evictions
        assert all(len(set(victims)) == len(victims) for victims in evictions)

    def walk(self, seed: int) -> list[list[int]]:
        random, policy, resident = np.random.default_rng(seed), self.make(N_FRAMES), only()
        evictions = []
        for _ in range(300):
            some = random.permutation(N_FRAMES)[: random.integers(N_FRAMES)]
            match random.integers(4):
                case 0:
                    new = some[~resident[some]]
                    policy.insert(new, random.permutation(40)[: len(new)] * 1000 + new, random.random(len(new)))
                    resident[new] = True
                case 1:
                    known = some[resident[some]]
                    policy.touch(np.tile(known, 2), random.random(2 * len(known)))
                case 2:
                    known = some[resident[some]][:3]
                    policy.remove(known)
                    resident[known] = False
                case 3:
                    evictable = resident & (random.random(N_FRAMES) < 0.7)
                    chosen = policy.victims(int(random.integers(evictable.sum() + 1)), evictable)
                    assert evictable[chosen].all()
                    resident[chosen] = False
                    evictions.append(chosen.tolist())
            policy._check(resident)
        assert sum(map(len, evictions)) > 100
        return evictions


def frames(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def weights(n: int) -> Any:
    return np.ones(n)


def batch(*numbers: int, first_id: int = 100) -> tuple[Any, Any, Any]:
    """Frames, and blocks that are `first_id` + frame."""
    return frames(*numbers), frames(*numbers) + first_id, weights(len(numbers))


def insert(policy: Policy, *numbers: int, first_id: int = 100) -> None:
    policy.insert(*batch(*numbers, first_id=first_id))


def touch(policy: Policy, *numbers: int) -> None:
    policy.touch(frames(*numbers), weights(len(numbers)))


def evict(policy: Policy, n: int, *evictable: int) -> list[int]:
    """The victims among these frames, all of the policy's where none are given."""
    return policy.victims(n, only(*evictable, n_frames=policy.n_frames)).tolist()


def only(*numbers: int, n_frames: int = N_FRAMES) -> Any:
    """Bool [n_frames], true for these frames."""
    mask = np.zeros(n_frames, np.bool_)
    mask[list(numbers)] = True
    return mask
