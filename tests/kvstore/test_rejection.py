"""Tokens that are proposed, checked and taken back: assisted generation seen from the store."""

import random

import numpy as np
import pytest

from kvstore import IndexConfig, KVStore
from tests import oracles
from tests.builders import SCHEMA, append, flat_config, make_query, make_rows, pq_config, same_bits

POOL = make_rows(SCHEMA, 2000, seed=6)
OVERLAP = flat_config(index=IndexConfig("pq", {"m": 2, "bits": 4}, min_rows=24, append_rows=8, build="overlap"))
SEGMENT = flat_config(index=IndexConfig("pq", {"m": 2, "bits": 4}, min_rows=24, append_rows=8, turns="segment"))
CONFIGS = {"flat": flat_config(), "pq": pq_config(), "overlap": OVERLAP, "segment": SEGMENT}


def rows_of(tokens):
    """Keys and values of tokens, a layer at a time."""
    return [(keys[:, tokens], values[:, tokens]) for keys, values in POOL]


def speculate(seq, n_rounds, n_drafted, seed):
    """Append drafts, keep a part of each and go on with another token; yields the tokens kept so far."""
    chance, tokens = random.Random(seed), list(range(100))
    append(seq, rows_of(tokens))
    for _ in range(n_rounds):
        draft = [chance.randrange(100, 2000) for _ in range(n_drafted)]
        append(seq, rows_of(draft))
        kept = chance.randint(0, n_drafted)
        seq.truncate(len(tokens) + kept)
        tokens = [*tokens, *draft[:kept], chance.randrange(100, 2000)]
        append(seq, rows_of(tokens[-1:]))
        yield tokens


@pytest.mark.parametrize("n_drafted", [1, 5, 40])  # 40: more than the window, and an input of its own
@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_taken_back_leaves_no_trace_in_rows_codes_and_answers(name, n_drafted):
    with KVStore(SCHEMA, CONFIGS[name]) as store, KVStore(SCHEMA, flat_config()) as other:
        seq, plain = store.create("book"), other.create("book")
        append(plain, rows_of(list(range(100))))
        for tokens in speculate(seq, 12, n_drafted, seed=n_drafted):
            store._check()
            append(plain, rows_of(tokens[len(plain) :]))
            for layer, (keys, values) in enumerate(rows_of(tokens)):
                q = make_query(SCHEMA, len(tokens) + layer)
                assert all(same_bits(a, b) for a, b in zip(seq.read(layer), (keys, values), strict=True))
                assert same_bits(seq.attend(layer, q, budget=None), plain.attend(layer, q, budget=None))
                explained = seq.explain(layer, q, analyze=True)
                plan, chosen = explained.plan, explained.measured.chosen
                read = [np.r_[: plan.sinks_stop, rows, plan.tail_start : plan.n_rows] for rows in chosen]
                expected = oracles.attention(q, keys, values, SCHEMA.scale, read)
                np.testing.assert_allclose(seq.attend(layer, q), expected, rtol=1e-4, atol=1e-5)
                assert all(map(np.array_equal, coded(seq, layer), coded_again(seq, layer, keys)))


def coded(seq, layer):
    """The codes of the rows that the index covers, one array a segment."""
    whole = seq._indexes[layer].index
    return [index.codes for index in getattr(whole, "segments", [whole] if whole is not None else [])]


def coded_again(seq, layer, keys):
    """The same, of these keys and the codebooks that are there."""
    whole, found = seq._indexes[layer].index, []
    for index in getattr(whole, "segments", [whole] if whole is not None else []):
        start, stop = index.first_row, index.stop_row
        fresh = index.clone()
        fresh.truncate(start)
        fresh.add(keys[:, start:stop].numpy().copy(), seq.positions(start, stop))
        found.append(fresh.codes)
    return found
