"""Recording the blocks that attention reads: the rows that the plan's own explanation names."""

import itertools

import numpy as np
import pytest

from kvstore import KVStore
from kvstore.replay.recording import record_blocks
from kvstore.replay.trace import BlockTraceError
from tests.builders import SCHEMA, append, bits, cut, filled, flat_config, make_query, make_rows, pq_config

LAYERS = range(SCHEMA.n_layers)


def decode(seq, n_steps, seed=5):
    """Steps of one token: append, then ask every layer; returns the answers."""
    rows, answers = make_rows(SCHEMA, n_steps, seed), []
    for step in range(n_steps):
        append(seq, cut(rows, step, step + 1))
        answers.append([seq.attend(layer, make_query(SCHEMA, 10 * step + layer)) for layer in LAYERS])
    return answers


@pytest.mark.parametrize("config", [flat_config(), pq_config()], ids=["flat", "pq"])
def test_recorded_are_the_rows_that_the_plan_has_chosen(config):
    store, seq, _ = filled(SCHEMA, config, 200)
    wanted = []
    with record_blocks(store, block_tokens=8) as recorder:
        rows = make_rows(SCHEMA, 6, 5)
        for step in range(6):
            append(seq, cut(rows, step, step + 1))
            for layer in LAYERS:
                q = make_query(SCHEMA, 10 * step + layer)
                seq.attend(layer, q)
                chosen = store.explain(seq, layer, q, analyze=True).measured.chosen
                wanted.append(np.unique(chosen // 8, return_counts=True))
        assert recorder.n_steps == 6
    trace = recorder.trace("made up")
    assert (trace.n_layers, trace.n_steps, trace.n_blocks) == (2, 6, 26)
    assert (trace.block_tokens, trace.model) == (8, "made up")
    assert trace.layers.tolist() == [0, 1] * 6
    for (ids, counts), layer, (blocks, held) in zip(trace.batches(), trace.layers, wanted, strict=True):
        assert (ids - layer * 26).tolist() == blocks.tolist()
        assert counts.tolist() == held.tolist()
        most = SCHEMA.n_kv_heads * 14  # the budget less two sinks and a window of eight
        assert 0 < counts.sum() <= most


def test_attention_answers_as_ever_and_nothing_stays():
    answers = []
    for record in (False, True):
        store, seq, _ = filled(SCHEMA, pq_config(), 200)
        if record:
            with record_blocks(store):
                answers.append(decode(seq, 4))
            assert "_run" not in vars(store)
        else:
            answers.append(decode(seq, 4))
    plain, recorded = (list(itertools.chain(*found)) for found in answers)
    assert [bits(x) for x in plain] == [bits(x) for x in recorded]


def test_blocks_are_the_schema_s_unless_said_otherwise():
    store, seq, _ = filled(SCHEMA, flat_config(), 100)
    with record_blocks(store) as recorder:
        decode(seq, 1)
    assert recorder.trace().block_tokens == SCHEMA.block_tokens
    assert recorder.trace().n_blocks == 7
    with pytest.raises(BlockTraceError, match="at least 1"), record_blocks(store, block_tokens=0):
        pass


def test_the_sequence_named_is_followed_or_else_the_first():
    store = KVStore(SCHEMA, flat_config())
    first, second = (store.create(name) for name in ("first", "second"))
    for seq, n in ((first, 100), (second, 300)):
        append(seq, make_rows(SCHEMA, n, n))
    with record_blocks(store) as any_one, record_blocks(store, "second") as named:
        decode(first, 2)
        decode(second, 3)
    assert (any_one.n_steps, named.n_steps) == (2, 3)
    assert any_one.trace().n_blocks == 7
    assert named.trace().n_blocks == 19
    assert "_run" not in vars(store)


def test_sequences_that_are_asked_together_are_told_apart():
    store = KVStore(SCHEMA, flat_config())
    both = [store.create(name) for name in ("first", "second")]
    for seq, n in zip(both, (100, 300), strict=True):
        append(seq, make_rows(SCHEMA, n, n))
    with record_blocks(store, "second") as together, record_blocks(store, "first") as other:
        for layer in LAYERS:
            q = make_query(SCHEMA, layer)[None].expand(2, -1, -1)
            store.attend(layer, both, q)
    with record_blocks(store) as alone:
        for layer in LAYERS:
            both[1].attend(layer, make_query(SCHEMA, layer))
    assert together.trace().blocks.tolist() == alone.trace().blocks.tolist()
    assert together.trace().counts.tolist() == alone.trace().counts.tolist()
    assert other.trace().n_blocks == 7


def test_a_step_that_was_cut_short_is_not_recorded():
    store, seq, _ = filled(SCHEMA, flat_config(), 100)
    with record_blocks(store) as recorder:
        seq.attend(0, make_query(SCHEMA, 1))
        with pytest.raises(BlockTraceError, match="no decode step was recorded"):
            recorder.trace()
        decode(seq, 2)
        seq.attend(0, make_query(SCHEMA, 2))
    assert recorder.trace().n_steps == 2


def test_dense_steps_select_nothing():
    store, seq, _ = filled(SCHEMA, flat_config(), 20)
    with record_blocks(store) as recorder:
        decode(seq, 2)
    assert recorder.trace().n_steps == 2
    assert len(recorder.trace().blocks) == 0


def test_an_error_inside_takes_the_recorder_away():
    store, _, _ = filled(SCHEMA, flat_config(), 20)
    with pytest.raises(KeyError), record_blocks(store):
        raise KeyError
    assert "_run" not in vars(store)
