"""Sequences join a batch and leave it at any step; each gets, bit for bit, what it gets alone."""

import dataclasses
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvstore import IndexConfig, KVStore, RopeSpec
from tests.builders import SCHEMA, append, cut, flat_config, make_query, make_rows, pq_config, same_bits
from tests.kvstore.test_larger_than_memory import SCHEMA as BIG
from tests.kvstore.test_larger_than_memory import limited

ROPE_SCHEMA = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(1e4, SCHEMA.head_dim),) * SCHEMA.n_layers)
N_STEPS, N_REQUESTS = 40, 9


class Request(NamedTuple):
    """When a request joins, how long its inputs are, and how many tokens it decodes after each of them."""

    number: int
    joins: int
    inputs: tuple[int, ...]
    answer: int

    def lengths(self):
        """Rows of each of its steps."""
        return [n for prompt in self.inputs for n in (prompt, *[1] * self.answer)]


def requests(seed):
    """Some that are there from the start, some that come and some that go while others decode."""
    chance = random.Random(seed)
    inputs = [(5,), (40,), (100,), (200, 60), (90, 40, 33), (1,), (64, 64), (150,), (33,)]
    return [
        Request(number, chance.randrange(N_STEPS // 2) if number > 2 else 0, inputs[number], chance.randint(1, 20))
        for number in range(N_REQUESTS)
    ]


class Walk:
    """One request on its way: what it appends next, and what it asks."""

    def __init__(self, store, request, name):
        self.seq, self._request = store.create(name), request
        self._lengths = request.lengths()
        self._rows = make_rows(store.schema, sum(self._lengths), seed=request.number)
        self._at = 0

    @property
    def has_ended(self):
        """Whether there is nothing left to append."""
        return not self._lengths

    def append(self, layer):
        """The rows of this step in one layer."""
        self.seq.append(layer, *cut(self._rows, self._at, self._at + self._lengths[0])[layer])

    def query(self, layer):
        """What it asks a layer in this step."""
        return make_query(self.seq._schema, 1000 * self._request.number + 10 * self._at + layer)

    def commit(self):
        """End the step."""
        self.seq.commit_step()
        self._at += self._lengths.pop(0)


def step(store, walks):
    """One forward pass of a batch; returns what each got, float32 [n_layers, n_q_heads, value_dim]."""
    for walk in walks:
        walk.seq.begin_step()
    outs = []
    for layer in range(store.schema.n_layers):
        for walk in walks:
            walk.append(layer)
        q = torch.stack([walk.query(layer) for walk in walks])
        outs.append(store.attend(layer, [walk.seq for walk in walks], q))
    for walk in walks:
        walk.commit()
    return list(torch.stack(outs, 1))


def alone(schema, config, request):
    """What a request gets in a store of its own, step after step."""
    with KVStore(schema, config) as store:
        walk, outs = Walk(store, request, "alone"), []
        while not walk.has_ended:
            outs += step(store, [walk])
    return outs


def together(store, wanted, check):
    """What requests get that join and leave; the order of the batch changes with every step."""
    outs, running, chance = {request.number: [] for request in wanted}, {}, random.Random(1)
    for at in range(200):
        for request in wanted:
            if request.joins == at:
                running[request.number] = Walk(store, request, f"r{request.number}")
        batch = list(running.items())
        chance.shuffle(batch)
        if batch:
            for (number, _), out in zip(batch, step(store, [walk for _, walk in batch]), strict=True):
                outs[number].append(out)
        for number in [number for number, walk in batch if walk.has_ended]:
            store.drop(running.pop(number).seq.name)
        check()
        if not running and at > N_STEPS:
            break
    return outs


def indexed(**changes):
    """Indexes from 24 rows on."""
    return flat_config(index=IndexConfig("pq", {"m": 2, "bits": 4}, min_rows=24, append_rows=8, **changes))


CONFIGS = {
    "dense": (SCHEMA, flat_config(budget=None)),
    "flat": (SCHEMA, flat_config()),
    "pq": (SCHEMA, pq_config()),
    "rope": (ROPE_SCHEMA, pq_config(budget=0.3)),
    "overlap": (SCHEMA, indexed(build="overlap", threads=2)),
    "overlap, reindex": (ROPE_SCHEMA, indexed(build="overlap", turns="reindex")),
    "overlap, segment": (ROPE_SCHEMA, indexed(build="overlap", turns="segment")),
    "page": (SCHEMA, flat_config(index=IndexConfig("page", {"page_tokens": 8}, min_rows=24, append_rows=8))),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_requests_that_join_and_leave_get_what_each_gets_alone_bit_for_bit(name, seed):
    schema, config = CONFIGS[name]
    with KVStore(schema, config) as store:
        found = together(store, requests(seed), store._check)
        assert len(store) == 0
        assert store.heap.used_blocks == 0
    for request in requests(seed):
        expected = alone(schema, config, request)
        assert len(found[request.number]) == len(expected) == len(request.lengths())
        assert all(same_bits(a, b) for a, b in zip(found[request.number], expected, strict=True))


@pytest.mark.parametrize("build", ["commit", "overlap"])
def test_so_do_requests_that_do_not_fit_into_memory_together(tmp_path, build):
    config = indexed(build=build)
    wanted = [
        Request(0, 0, (150, 150), 12),
        Request(1, 3, (200,), 20),
        Request(2, 9, (120,), 5),
        Request(3, 9, (9,), 30),
    ]
    with KVStore.open(tmp_path / "s", BIG, limited(config, heap_bytes=60 * BIG.block_bytes)) as store:
        found = together(store, wanted, store._check)
        assert store.stats().spills > 0
        assert store.check() == []
    for request in wanted:
        expected = alone(BIG, config, request)
        assert len(expected) == len(found[request.number])
        assert all(same_bits(a, b) for a, b in zip(found[request.number], expected, strict=True))


def test_a_batch_of_forks_goes_on_as_their_copies_would():
    """Beams: each step some are dropped and others are forked in their place."""
    with KVStore(SCHEMA, pq_config()) as store:
        rows, chance = make_rows(SCHEMA, 1000, seed=3), random.Random(2)
        root = store.create("beam 0")
        append(root, cut(rows, 0, 100))
        beams, made = {"beam 0": [*range(100)]}, 1
        for _ in range(20):
            parents = chance.choices(sorted(beams), k=3)
            fresh = {}
            for parent in parents:
                token, name = chance.randrange(100, 1000), f"beam {made}"
                made += 1
                append(store[parent].fork(name), cut(rows, token, token + 1))
                fresh[name] = [*beams[parent], token]
            for name in beams:
                store.drop(name)
            beams = fresh
            store._check()
            for layer, (_, values) in enumerate(rows):
                q = torch.stack([make_query(SCHEMA, made + i) for i in range(3)])
                outs = store.attend(layer, [store[name] for name in beams], q, budget=24)
                for i, (name, tokens) in enumerate(beams.items()):
                    assert same_bits(store[name].read(layer)[1], values[:, tokens])
                    assert same_bits(outs[i], copy_of(rows, tokens).attend(layer, q[i], budget=24))
                    codes = store[name]._indexes[layer].index.codes
                    assert np.array_equal(codes, copy_of(rows, tokens)._indexes[layer].index.codes)


def copy_of(rows, tokens):
    """A sequence that got these tokens one after another, the first hundred at once."""
    seq = KVStore(SCHEMA, pq_config()).create("copy")
    for part in (tokens[:100], *([token] for token in tokens[100:])):
        append(seq, [(keys[:, part], values[:, part]) for keys, values in rows])
    return seq
