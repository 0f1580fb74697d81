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


def decode(engine, ids):
    """Logits of 20 tokens, one at a time, after a prompt of 100."""
    engine.start(121)
    with engine.active():
        engine.forward(ids[:100])
        return torch.cat([engine.forward(ids[i : i + 1]) for i in range(100, 120)])


def test_all_engines_compute_the_same(engine, model, ids):
    """Step for step: a pass of 120 tokens rounds its products otherwise, by as much as the caches may differ."""
    wanted = decode(make_engine(DYNAMIC, model), ids)
    torch.testing.assert_close(decode(engine, ids), wanted, rtol=0, atol=1e-4)


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
