"""Indexes built beside a model's forward pass: tokens and logits are those of indexes built at the commit."""

import pytest
import torch

pytest.importorskip("transformers", reason="the adapter needs the extra hf")

from kvstore import IndexConfig, MaintenanceError
from kvstore.adapters.hf import StoreCache, use_store_attention
from tests.builders import same_bits
from tests.executors import Stepping

pytestmark = pytest.mark.hf


def new_cache(model, build, **changes):
    options = {"m": 1, "bits": 4} | changes.pop("options", {})
    index = IndexConfig("pq", options, min_rows=24, append_rows=8, build=build, **changes)
    return StoreCache(model, budget=24, dense_rows=0, sinks=2, window=4, min_selected=4, index=index)


def assert_same_indexes(cache, other):
    assert len(cache.sequences) == len(other.sequences)
    for mine, theirs in zip(cache.sequences, other.sequences, strict=True):
        for a, b in zip(mine._indexes, theirs._indexes, strict=True):
            assert a.covered == b.covered
            assert a.describe() == b.describe()
            assert a.index.codes.tolist() == b.index.codes.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "changes", [{}, {"threads": 2}, {"options": {"weighting": "queries"}}, {"codebook": "model", "codebook_rows": 40}],
    ids=["default", "threads", "weighting", "model"],
)  # fmt: skip
def test_a_padded_batch_writes_the_same(tiny, prompt, generate, family, changes):
    model, ids = tiny(family), prompt(70, 0, 9, 31)
    caches = [new_cache(model, build, **changes) for build in ("overlap", "commit")]
    with use_store_attention(model):
        texts = [generate(model, cache, ids) for cache in caches]
    assert texts[0][0].shape == (3, 82)
    assert torch.equal(texts[0][0], texts[1][0])
    assert same_bits(texts[0][1], texts[1][1])
    for cache in caches:
        cache.store.wait()
    assert_same_indexes(*caches)


MODES = {
    "beams": {"num_beams": 4},
    "beams that are sampled": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "looked up": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant_model": "smollm2"},
}


@pytest.mark.parametrize("wanted", [70, 24])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_generating_writes_the_same(tiny, prompt, generate, mode, wanted):
    model, options = tiny("llama"), dict(MODES[mode])
    ids = prompt(wanted).repeat(1, 2) if mode == "looked up" else prompt(wanted)
    if mode == "assisted":
        options["assistant_model"] = tiny(options["assistant_model"])
    caches, texts = [new_cache(model, build) for build in ("overlap", "commit")], []
    for cache in caches:
        torch.manual_seed(3)
        with use_store_attention(model):
            texts.append(generate(model, cache, ids, max_new_tokens=40, **options).tokens)
        cache.store.wait()
        cache.store._check()
    assert texts[0].shape[1] >= ids.shape[1] + 40
    assert torch.equal(*texts)
    assert_same_indexes(*caches)


@pytest.mark.parametrize("turns", ["extend", "reindex", "segment"])
def test_turns_and_tokens_taken_back_write_the_same(tiny, prompt, generate, turns):
    model = tiny("llama")
    caches, texts = [new_cache(model, build, turns=turns) for build in ("overlap", "commit")], []
    for cache in caches:
        ids = prompt(60)
        with use_store_attention(model):
            for turn in range(3):
                said = generate(model, cache, ids).tokens
                cache.crop(-5)
                ids = torch.cat([said[:, :-5], prompt(40, seed=turn + 1)], 1)
        texts.append(said)
        cache.store._check()
    assert torch.equal(*texts)
    for mine, theirs in zip(caches[0].sequences[0]._indexes, caches[1].sequences[0]._indexes, strict=True):
        assert mine.covered == theirs.covered
        assert mine.describe() == theirs.describe()


def test_builds_lie_beside_the_pass(tiny, prompt, forward):
    model = tiny("llama")
    cache = new_cache(model, "overlap")
    with use_store_attention(model), cache.store.timeline() as timeline:
        forward(model, cache, prompt(100))
        cache.store.wait()
    builds = [event for event in timeline.events if event.name == "build"]
    (step,) = (event for event in timeline.events if event.name == "step")
    assert [event.layer for event in builds] == [0, 1, 2, 3]
    assert all(event.lane.startswith("kvstore-maintenance") for event in builds)
    assert builds[0].start_us < step.stop_us


def test_a_failure_surfaces_in_the_first_decoded_token_and_the_next_goes_on(tiny, prompt, forward):
    model, ids = tiny("llama"), prompt(101)
    cache, other = new_cache(model, "overlap"), new_cache(model, "commit")
    cache.store.maintenance.executor = worker = Stepping()
    with use_store_attention(model):
        for each in (cache, other):
            forward(model, each, ids[:, :100])
        worker.works[2].fail(MemoryError("no room"))
        with pytest.raises(MaintenanceError, match="no room"):
            forward(model, cache, ids, start=100)
        forward(model, cache, ids, start=100)
        assert [keeper.covered for keeper in cache.sequences[0]._indexes] == [(2, 96), (2, 96), None, (2, 96)]
        cache.crop(100)
        cache.sequences[0].reindex(2)
        found, wanted = (forward(model, each, ids, start=100) for each in (cache, other))
    assert cache.get_seq_length() == other.get_seq_length() == 101
    assert same_bits(found, wanted)
