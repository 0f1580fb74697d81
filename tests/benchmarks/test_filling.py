import pytest
import torch

from benchmarks.engines import DENSE_PEERS, DYNAMIC, STORE, make_engine
from benchmarks.filling import ENGINES_AND_SPARE, Passage, fill, read_passage
from benchmarks.speed import Effort, WrongResultError, measure_cost

pytestmark = pytest.mark.hf

N_READ, N_ROWS = 120, 310  # two whole repeats and a part of one
EFFORT = Effort(prompts=1, blocks=1, block_tokens=8, check_tokens=4)


@pytest.fixture(scope="module")
def passage(model, ids):
    return read_passage(model, ids, N_READ)


def filled(name, model, passage, config):
    engine = make_engine(name, model, config)
    fill(engine, passage, N_ROWS, N_ROWS + EFFORT.tokens_after)
    return engine


def logits_after(engine, tokens):
    with engine.active():
        return torch.cat([engine.forward(token[None]) for token in tokens])


def test_a_passage_is_what_a_dense_cache_holds(model, ids, passage):
    assert len(passage.layers) == 2
    assert all(x.shape == (1, 1, N_READ, 64) for pair in passage.layers for x in pair)
    assert torch.equal(passage.after, ids[N_READ:])
    assert passage.row_bytes == 2 * 2 * 64 * 4


def test_rows_repeat_those_of_the_passage(model, passage, config):
    engine = filled(DYNAMIC, model, passage, config)
    for layer, pair in zip(engine.cache.layers, passage.layers, strict=True):
        for got, read in zip((layer.keys, layer.values), pair, strict=True):
            assert got.shape[2] == N_ROWS
            assert torch.equal(got[:, :, :N_READ], read)
            assert torch.equal(got[:, :, N_READ : 2 * N_READ], read)
            assert torch.equal(got[:, :, 2 * N_READ :], read[:, :, : N_ROWS - 2 * N_READ])


@pytest.mark.parametrize("name", [*DENSE_PEERS, STORE])
def test_filled_caches_give_the_same_logits(name, model, passage, config):
    tokens = passage.after[:6]
    wanted = logits_after(filled(DYNAMIC, model, passage, config), tokens)
    engine = filled(name, model, passage, config)
    torch.testing.assert_close(logits_after(engine, tokens), wanted, rtol=0, atol=1e-4)
    engine.close()


def test_the_filled_store_has_its_indexes_and_tokens_stay_in_the_context(model, passage, config):
    engine = filled(STORE, model, passage, config)
    (sequence,) = engine.cache.sequences
    assert len(sequence) == N_ROWS
    engine.set_budget(0.2)
    q = torch.zeros(3, 64)
    for layer in range(2):
        assert sequence.explain(layer, q).plan.method == "index"
    with engine.active():
        engine.forward(passage.after[:1])
    (sequence,) = engine.cache.sequences
    assert sequence.positions().tolist() == [*range(N_ROWS), N_READ]
    engine.back(1)
    assert engine.position == N_READ
    engine.close()


def test_whole_repeats_are_attended_to_like_the_passage_itself(model, passage, config):
    """Every key as often as every other changes no weight, so what follows is predicted as after reading the text."""
    ours, read = make_engine(STORE, model, config), make_engine(DYNAMIC, model)
    fill(ours, passage, 3 * N_READ, 0)
    fill(read, passage, N_READ, 0)
    got, wanted = (logits_after(engine, passage.after[:1]) for engine in (ours, read))
    assert (got - wanted).abs().max() < 0.2 * wanted.std()  # the token's own row is there once
    ours.close()


def test_costs_are_told_of_a_length_that_nothing_has_read(model, passage, config):
    lines = []
    speed = measure_cost(model, passage, N_ROWS, (None, 0.2), EFFORT, lines.append, config)
    assert speed.cost_only
    assert speed.first_token_s == {}
    assert set(speed.tokens_per_s) == {*DENSE_PEERS, None, 0.2}
    assert set(speed.splits) == {None, 0.2}
    assert all(difference < 1e-3 for difference in speed.logit_difference.values())
    assert "filling store" in lines


def test_a_cache_that_was_filled_otherwise_is_not_timed(model, passage, config, monkeypatch):
    from benchmarks.views import ViewsLayer

    right = ViewsLayer.update
    monkeypatch.setattr(ViewsLayer, "update", lambda *args, **kwargs: tuple(x * 1.01 for x in right(*args, **kwargs)))
    lines = []
    with pytest.raises(WrongResultError, match="preallocated views"):
        measure_cost(model, passage, N_ROWS, (None,), EFFORT, lines.append, config)
    assert not any("decode" in line for line in lines)


def test_memory_must_have_room(passage, monkeypatch):
    import psutil

    there = ENGINES_AND_SPARE * 1000 * passage.row_bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": there}))
    assert passage.fits(1000)
    assert not passage.fits(1001)
    assert not Passage(passage.layers * 2, passage.after).fits(1000)
