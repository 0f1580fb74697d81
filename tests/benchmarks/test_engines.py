import pytest
import torch

from benchmarks.engines import DENSE_PEERS, DYNAMIC, STORE, make_engine

pytestmark = pytest.mark.hf


@pytest.fixture(params=[*DENSE_PEERS, STORE])
def engine(request, model, config):
    engine = make_engine(request.param, model, config)
    yield engine
    engine.close()


def test_stepping_back_leaves_the_cache_as_it_was(engine, ids):
    engine.start(120)
    with engine.active():
        engine.forward(ids[:100])
        first = [engine.forward(token[None]) for token in ids[100:105]]
        engine.back(5)
        engine.forward(ids[200:201])  # something else where the rows were
        engine.back(1)
        again = [engine.forward(token[None]) for token in ids[100:105]]
    torch.testing.assert_close(torch.stack(again), torch.stack(first), rtol=0, atol=1e-5)


def test_all_engines_compute_the_same(engine, model, ids):
    reference = make_engine(DYNAMIC, model)
    reference.start(0)
    wanted = reference.forward(ids[:120], keep=20)
    engine.start(121)
    with engine.active():
        engine.forward(ids[:100])
        got = torch.cat([engine.forward(ids[i : i + 1]) for i in range(100, 120)])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_held_bytes_cover_keys_and_values(engine, model, ids):
    engine.start(100)
    with engine.active():
        engine.forward(ids[:100])
    config = model.config
    row_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert engine.held_bytes() >= 100 * row_bytes
    if engine.name != STORE:  # the store's heap grows by arenas
        assert engine.held_bytes() == 100 * row_bytes


def test_unknown_names_are_refused(model):
    with pytest.raises(ValueError, match="no engine"):
        make_engine("other", model)
