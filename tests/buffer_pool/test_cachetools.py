"""LRU and LFU find what cachetools finds, block by block and batch by batch."""

import math

import cachetools
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.buffer_pool.builders import make_pool

PEERS = {
    "lru": (cachetools.LRUCache, {}),
    "lfu": (cachetools.LFUCache, {"half_life": math.inf}),
}
policies = pytest.mark.parametrize("policy", PEERS)
TRACES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), max_size=60)


def make_pair(policy, n_frames):
    peer, options = PEERS[policy]
    return make_pool(n_frames, policy=policy, policy_options=options), peer(n_frames)


def pool_hits(pool, ids):
    """Which of ids are found; those that are not come in."""
    frames = pool.lookup(ids)
    found = frames >= 0
    pool.touch(frames)
    new = np.asarray(ids)[~found]
    pool.commit(new, pool.reserve(len(new), protected=frames))
    pool._check()
    return found.tolist()


def peer_hits(peer, ids):
    found = [block in peer for block in ids]
    for block, is_found in zip(ids, found, strict=True):
        if is_found:
            peer[block]
    for block, is_found in zip(ids, found, strict=True):
        if not is_found:
            peer[block] = None
    return found


@policies
@given(trace=st.lists(st.integers(0, 12), max_size=120), n_frames=st.integers(1, 8))
def test_one_block_at_a_time(policy, trace, n_frames):
    pool, peer = make_pair(policy, n_frames)
    for block in trace:
        assert pool_hits(pool, [block]) == peer_hits(peer, [block])
    assert pool.resident().tolist() == sorted(peer)


@given(trace=TRACES, n_frames=st.integers(4, 9))
def test_batches_lru(trace, n_frames):
    pool, peer = make_pair("lru", n_frames)
    for ids in trace:
        assert pool_hits(pool, ids) == peer_hits(peer, ids)
    assert pool.resident().tolist() == sorted(peer)


@policies
def test_a_long_skewed_trace(policy):
    random = np.random.default_rng(5)
    pool, peer = make_pair(policy, 64)
    hits = [0, 0]
    for start in range(500):
        for block in (random.zipf(1.3, 8) % 500 + start // 10).tolist():
            hits[0] += sum(pool_hits(pool, [block]))
            hits[1] += sum(peer_hits(peer, [block]))
    assert hits[0] == hits[1] > 1000
