"""Conversations: how the inputs after the first are indexed."""

import dataclasses

import pytest

from kvstore import ConfigError, IndexConfig, KVStore, RopeSpec
from kvstore.index.segments import SegmentedIndex
from tests.builders import SCHEMA, append, fill, flat_config, make_query, make_rows, same_bits

ROPE_SCHEMA = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(1e4, SCHEMA.head_dim),) * SCHEMA.n_layers)
MIB = 1 << 20
INPUTS, ANSWER = (120, 90, 64), 20


def config(turns, **changes):
    index = IndexConfig("pq", {"m": 1, "bits": 5}, min_rows=40, append_rows=8, turns=turns, **changes)
    return flat_config(index=index, spill_bytes=64 * MIB)


def talk(seq, inputs=INPUTS, seed=0):
    """Inputs in one step each, answers row by row."""
    for turn, n in enumerate(inputs):
        fill(seq, n, seed=seed + 100 * turn)
        for i in range(ANSWER):
            append(seq, make_rows(seq._schema, 1, seed + 100 * turn + 1 + i))


def answers(seq):
    return [seq.attend(layer, make_query(SCHEMA, i)) for layer in range(SCHEMA.n_layers) for i in range(3)]


def all_same(ours, theirs):
    return all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("turns", "builds", "segments"), [("extend", 1, 1), ("reindex", 3, 1), ("segment", 3, 3)])
def test_each_way_trains_what_it_says_and_covers_every_row(turns, builds, segments):
    with KVStore(ROPE_SCHEMA, config(turns)) as store:
        seq = store.create("talk")
        talk(seq)
        for keeper in seq._indexes:
            index = keeper.index
            assert keeper.n_builds == builds
            assert len(index.segments if isinstance(index, SegmentedIndex) else [index]) == segments
            assert len(seq) - index.stop_row < store.config.window + store.config.index.append_rows
            index._check()
        for layer in range(SCHEMA.n_layers):
            q = make_query(SCHEMA, 1)
            assert same_bits(seq.attend(layer, q, budget=len(seq)), seq.attend(layer, q, budget=None))
            exact = store.topk(layer, 0, q[0], 30, exact=True).positions
            assert len(set(exact.tolist()) & set(store.topk(layer, 0, q[0], 30).positions.tolist())) >= 10
        if segments > 1:
            assert seq.explain(0, make_query(SCHEMA, 0)).as_dict()["index"]["segments"] == segments


def test_a_segment_is_trained_on_its_input_and_codes_the_answer():
    with KVStore(ROPE_SCHEMA, config("segment")) as store, KVStore(ROPE_SCHEMA, config("extend")) as other:
        seq, twin = store.create("talk"), other.create("talk")
        for s in (seq, twin):
            talk(s, INPUTS[:1])
        first = [keeper.index.codebook for keeper in seq._indexes]
        fill(seq, 90, seed=7)
        for keeper, codebook in zip(seq._indexes, first, strict=True):
            old, new = keeper.index.segments
            assert old.codebook is codebook
            assert new.codebook is not codebook
            assert new.first_row == old.stop_row
        before = [keeper.index.segments[-1].n_rows for keeper in seq._indexes]
        fill(seq, 30, seed=8)  # too few to be an input
        for keeper, n in zip(seq._indexes, before, strict=True):
            assert len(keeper.index.segments) == 2
            assert keeper.index.segments[-1].n_rows > n


@pytest.mark.parametrize("turns", ["extend", "reindex", "segment"])
def test_a_conversation_goes_on_from_disk_as_if_it_had_never_ended(tmp_path, turns):
    with KVStore(ROPE_SCHEMA, config(turns)) as store:
        seq = store.create("talk")
        talk(seq)
        said = answers(seq)
        talk(seq, (70,), seed=5)
        went_on = answers(seq)
    with KVStore.open(tmp_path / "s", ROPE_SCHEMA, config(turns)) as store:
        talk(store.create("talk"))
    with KVStore.open(tmp_path / "s") as store:
        assert store.config.index.turns == turns
        assert all_same(answers(store["talk"]), said)
        assert store.check() == []
        talk(store["talk"], (70,), seed=5)
        assert all_same(answers(store["talk"]), went_on)


def test_segments_are_cut_and_forked():
    with KVStore(ROPE_SCHEMA, config("segment")) as store:
        seq = store.create("talk")
        talk(seq)
        before, twin = answers(seq), seq.fork("twin")
        twin.truncate(150)
        store._check()
        assert {len(keeper.index.segments) for keeper in twin._indexes} == {2}
        twin.truncate(30)
        store._check()
        talk(twin, (100,), seed=9)
        store._check()
        assert all_same(answers(seq), before)
        seq.reindex()
        assert not isinstance(seq._indexes[0].index, SegmentedIndex)


def test_kinds_without_a_codebook_have_no_turns():
    index = IndexConfig("sq8", min_rows=40, append_rows=8, turns="segment")
    with KVStore(SCHEMA, flat_config(index=index)) as store:
        seq = store.create("talk")
        talk(seq)
        assert seq._indexes[0].index.kind == "sq8"


@pytest.mark.parametrize(("changes", "text"), [({"turns": "forget"}, "extend"), ({"codebook": "model"}, "sequence")])
def test_settings_that_do_not_go_together_are_named(changes, text):
    with pytest.raises(ConfigError, match=text):
        IndexConfig(**({"turns": "segment"} | changes))
