"""Random walks through a pool, for each policy, beside a model that is a dictionary of blocks and a list of guards."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.buffer_pool import FramePinnedError, FrameStateError, GuardReleasedError, InvalidBatchError
from tests.buffer_pool.builders import Device, everything, held, load, make_pool

ID = st.integers(0, 13).map(lambda n: n * 10**17 - 5 * 10**17)
IDS = st.lists(ID, max_size=10)
UNIQUE = st.lists(ID, max_size=10, unique=True)
WHICH = st.integers(0, 9)
WEIGHTS = st.sampled_from([0.0, 0.25, 1.0, 7.0])


class FaultError(Exception):
    """What a tier raises."""


class PoolMachine(RuleBasedStateMachine):
    """The policy is a class attribute; `uses` and `stamps` say what LRU and LFU must evict."""

    policy, options = "lru", {}

    def __init__(self):
        super().__init__()
        self.device = Device()
        self.blocks: set[int] = set()
        self.reserved: list[int] = []
        self.guards = []  # (guard, ids)
        self.leaving = []  # (event, ids)
        self.uses, self.stamps, self.now = Counter(), {}, 0
        self.expected = Counter()

    @initialize(n_frames=st.sampled_from([0, 1, 3, 6, 8]), admit_blocks=st.sampled_from([0, 2, 5]))
    def make(self, n_frames, admit_blocks):
        self.pool = make_pool(
            n_frames,
            policy=self.policy,
            policy_options=self.options,
            admit_blocks=admit_blocks,
            record_event=self.device.record,
        )

    # ---- the model ----

    def pinned(self):
        return {block for _, ids in [*self.guards, *self.leaving] for block in ids}

    def room(self, protected=()):
        return self.n_free() + len(self.blocks - self.pinned() - set(protected))

    def n_free(self):
        return self.pool.n_frames - len(self.blocks) - len(self.reserved)

    def use(self, block):
        self.uses[block] += 1
        self.now += 1
        self.stamps[block] = self.now

    def lose(self, gone, protected=()):
        """Take evicted blocks from the model, after a look at whether these had to be the ones."""
        gone = set(gone)
        assert not gone & (self.pinned() | set(protected)), "a pinned or protected block was evicted"
        kept = self.blocks - gone - self.pinned() - set(protected)
        if gone and kept:
            assert self.first_to_go(gone, kept), (gone, kept)
        self.blocks -= gone
        for block in gone:
            del self.uses[block], self.stamps[block]
        self.expected["evictions"] += len(gone)

    def first_to_go(self, gone, kept):
        rank = {
            "lru": lambda block: self.stamps[block],
            "lfu": lambda block: (self.uses[block], self.stamps[block]),
        }.get(self.policy, lambda block: 0)
        return max(map(rank, gone)) <= min(map(rank, kept))

    def let_in(self, ids):
        for block in ids:
            self.blocks.add(block)
            self.use(block)
        self.expected["admissions"] += len(ids)

    def lookup(self, ids):
        frames = self.pool.lookup(ids)
        assert [frame >= 0 for frame in frames.tolist()] == [block in self.blocks for block in ids]
        self.expected["lookups"] += len(ids)
        self.expected["hits"] += int((frames >= 0).sum())
        return frames

    # ---- finding and reading ----

    @rule(ids=IDS, weight=WEIGHTS)
    def look_up_and_touch(self, ids, weight):
        self.pool.touch(self.lookup(ids), weight)
        for block in ids:
            if block in self.blocks:
                self.use(block)

    @rule(ids=IDS)
    def pin(self, ids):
        found = [block for block in ids if block in self.blocks]
        self.guards.append((self.pool.pin(self.lookup(ids)), found))
        self.expected["pins"] += len(found)

    @precondition(lambda self: self.guards)
    @rule(which=WHICH)
    def release(self, which):
        guard, ids = self.guards.pop(which % len(self.guards))
        assert len(guard.frames) == len(ids)
        guard.release()
        self.leaving.append((self.device.pending[-1], ids))
        with pytest.raises(GuardReleasedError):
            guard.release()

    @precondition(lambda self: self.leaving)
    @rule(n=st.sampled_from([1, 2, None]))
    def the_device_goes_on(self, n):
        self.device.finish(n)
        self.leaving = [(event, ids) for event, ids in self.leaving if not event.done]

    # ---- filling ----

    @rule(n=st.integers(0, 9), protected=IDS)
    def reserve(self, n, protected):
        frames = self.pool.reserve(n, protected=self.lookup(protected))
        if frames is None:
            assert n > self.room(protected), "there were enough frames"
            self.expected["stalls"] += 1
            return
        assert n <= self.room(protected)
        gone = self.blocks - set(self.pool.resident().tolist())
        assert len(gone) == max(0, n - self.n_free()), "more was evicted than needed"
        self.lose(gone, protected)
        self.reserved += frames.tolist()
        assert len(set(self.reserved)) == len(self.reserved)

    @precondition(lambda self: self.reserved)
    @rule(ids=UNIQUE, weight=WEIGHTS)
    def commit(self, ids, weight):
        ids = [block for block in ids if block not in self.blocks][: len(self.reserved)]
        frames, self.reserved = self.reserved[: len(ids)], self.reserved[len(ids) :]
        for block, frame in zip(ids, frames, strict=True):
            load(block, self.pool.frames[frame])
            assert block not in self.pool, "visible before it was committed"
        self.pool.commit(ids, frames, weight)
        self.let_in(ids)

    @precondition(lambda self: self.reserved)
    @rule(n=st.integers(1, 4))
    def abort(self, n):
        self.pool.abort(self.reserved[:n])
        del self.reserved[:n]

    @rule(ids=UNIQUE, counts=st.lists(st.integers(0, 5), min_size=10, max_size=10), fails_at=st.integers(0, 20))
    def admit(self, ids, counts, fails_at):
        calls, before = [], everything(self.pool)

        def fault(block, frame):
            load(block, frame)
            calls.append(block)
            if len(calls) > fails_at:
                frame[:9] = 3
                raise FaultError

        wanted = [pair for pair in sorted(zip(counts, ids, strict=False), key=lambda pair: -pair[0]) if pair[0]]
        best = [block for _, block in wanted[: min(self.pool.admit_blocks, self.pool.n_frames)]]
        missing = [block for block in best if block not in self.blocks]
        try:
            admitted = self.pool.admit(ids, counts[: len(ids)], fault).tolist()
        except FaultError:
            assert everything(self.pool) == before
            return
        known = [block for block in best if block in self.blocks]
        assert admitted == calls == missing[: self.room(known)]
        gone = self.blocks - set(self.pool.resident().tolist())
        assert len(gone) == max(0, len(admitted) - self.n_free())
        self.lose(gone, known)
        self.let_in(admitted[::-1])
        for block in known[::-1]:
            self.use(block)
        self.expected["stalls"] += len(admitted) < len(missing)

    @rule(ids=IDS)
    def drop(self, ids):
        known = set(ids) & self.blocks
        leaving = {block for _, waiting in self.leaving for block in waiting}
        if known & (self.pinned() & {block for _, held_ids in self.guards for block in held_ids}):
            with pytest.raises(FramePinnedError):
                self.pool.drop(ids)
        else:
            assert self.pool.drop(ids) == len(known)
            self.blocks -= known
            for block in known:
                del self.uses[block], self.stamps[block]
            self.expected["drops"] += len(known)
        if set(ids) & (leaving | self.pinned()):
            self.leaving = [(event, waiting) for event, waiting in self.leaving if not event.done]

    # ---- misuse ----

    @rule(block=ID, which=WHICH)
    def misuse(self, block, which):
        before = everything(self.pool)
        with pytest.raises(FrameStateError):
            self.pool.touch([self.pool.n_frames + which])
        with pytest.raises(InvalidBatchError):
            self.pool.admit([block, block], [1, 1], load)
        with pytest.raises(FrameStateError):
            self.pool.commit([block], [self.pool.n_frames])
        if self.reserved and self.blocks:
            known = sorted(self.blocks)[which % len(self.blocks)]
            with pytest.raises(InvalidBatchError):
                self.pool.commit([known], self.reserved[:1])
            with pytest.raises(FrameStateError):
                self.pool.pin(self.reserved[:1])
        assert everything(self.pool) == before

    # ---- what holds always ----

    @invariant()
    def the_pool_is_sound_and_is_what_the_model_says(self):
        self.pool._check()
        assert held(self.pool) == sorted(self.blocks)
        stats = self.pool.stats()
        assert stats.reserved_frames == len(self.reserved)
        assert stats.free_frames == self.n_free() >= 0
        assert stats.guards == len(self.guards)
        counted = stats.as_dict()["counters"]
        assert counted.pop("misses") == self.expected["lookups"] - self.expected["hits"]
        assert counted == {name: self.expected[name] for name in counted}

    @invariant()
    def guards_hold_their_blocks(self):
        for guard, ids in self.guards:
            states = self.pool._residency.states
            assert states.owners[guard.frames].tolist() == ids

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for guard, _ in self.guards:
            guard.release()
        self.pool.close()


@pytest.mark.parametrize(
    ("policy", "options"),
    [("lru", {}), ("lfu", {"half_life": math.inf}), ("clock", {}), ("score-decay", {"half_life": 2}), ("arc", {})],
)
def test_random_walks(policy, options):
    machine = type("Machine", (PoolMachine,), {"policy": policy, "options": options})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))


def test_ten_thousand_operations_keep_the_accounts():
    random, pool, loads = np.random.default_rng(0), make_pool(20, admit_blocks=6), []

    def counted(block, frame):
        loads.append(block)
        load(block, frame)

    for number in range(2500):
        ids = np.unique(random.zipf(1.3, 12) % 200)
        with pool.pin(pool.lookup(ids)):
            pool.admit(ids, random.integers(1, 9, len(ids)), counted)
        if number % 50 == 0:
            pool.drop(random.integers(0, 200, 5))
            pool._check()
    counters = pool.counters
    assert counters.admissions == len(loads) > 2500
    assert counters.admissions - counters.evictions - counters.drops == len(held(pool))
