"""Indexes of a store that are trained for the queries it was shown."""

import numpy as np
import pytest
import torch

from kvstore import ConfigError, IndexConfig, KVStore, NonFiniteError, SchemaMismatchError, StepError
from kvstore.index.weighting import query_moments
from tests.builders import SCHEMA, append, fill, filled, flat_config, make_query, make_rows, random

HEADS, DIM = SCHEMA.n_kv_heads, SCHEMA.head_dim


def config(codebook="sequence", **options):
    index = IndexConfig(
        "pq", {"m": 2, "bits": 4, **options}, min_rows=24, append_rows=8, codebook=codebook, codebook_rows=100
    )
    return flat_config(index=index)


def queries(n, seed=0):
    return random((SCHEMA.n_q_heads, n, DIM), seed) * torch.linspace(0.1, 4, DIM)


def grouped(q):
    return q.reshape(HEADS, -1, DIM).numpy()


def prompted(store, n=200, name="book"):
    """A sequence of n rows in one step, shown other queries in each layer."""
    seq = store.create(name)
    with seq.step():
        for layer, (keys, values) in enumerate(make_rows(SCHEMA, n, 0)):
            seq.append(layer, keys, values)
            seq.observe_queries(layer, queries(50, layer))
    return seq


def weighting_of(seq, layer):
    return seq._indexes[layer].index.codebook.weighting


def test_each_layer_is_coded_for_its_own_queries():
    seq = prompted(KVStore(SCHEMA, config(weighting="queries")))
    for layer in range(SCHEMA.n_layers):
        moments = query_moments(grouped(queries(50, layer)))
        roots = weighting_of(seq, layer).forth.astype(float)
        scale = np.trace(moments, axis1=1, axis2=2) / DIM
        np.testing.assert_allclose(roots @ roots, moments / scale[:, None, None], rtol=1e-3, atol=2e-3)
        assert "weighting=queries" in str(seq.explain(layer, make_query(SCHEMA, 1)))


def test_without_the_setting_or_without_queries_nothing_is_weighted():
    plain = prompted(KVStore(SCHEMA, config()))
    _, unseen, _ = filled(SCHEMA, config(weighting="queries"), 200)
    for layer in range(SCHEMA.n_layers):
        assert plain._indexes[layer].query_moments is None
        assert weighting_of(plain, layer) is weighting_of(unseen, layer) is None
        codes = [seq._indexes[layer].index.codes for seq in (plain, unseen)]
        np.testing.assert_array_equal(*codes)
    assert "weighting=none, no queries seen" in str(unseen.explain(0, make_query(SCHEMA, 1)))


@pytest.mark.parametrize("background", [False, True])
def test_a_reindex_uses_the_queries_seen_since(background):
    store = KVStore(SCHEMA, config(weighting="queries"))
    seq = store.create("book")
    fill(seq, 200)
    assert weighting_of(seq, 0) is None
    for layer in range(SCHEMA.n_layers):
        seq.observe_queries(layer, queries(30))
    seq.reindex(background=background)
    store.wait()
    assert weighting_of(seq, 0) is not None


def test_a_fork_has_seen_what_its_parent_saw_and_then_goes_its_own_way():
    store = KVStore(SCHEMA, config(weighting="queries"))
    seq = prompted(store)
    before = seq._indexes[0].query_moments
    child = seq.fork("child")
    child.observe_queries(0, queries(30, seed=7))
    np.testing.assert_array_equal(seq._indexes[0].query_moments, before)
    assert not np.array_equal(child._indexes[0].query_moments, before)


def test_a_model_codebook_is_shared_saved_and_loaded_with_its_metric(tmp_path):
    store = KVStore(SCHEMA, config("model", weighting="queries"))
    first = prompted(store)
    other = store.create("other")
    fill(other, 60, seed=3)
    assert weighting_of(other, 0) is weighting_of(first, 0) is not None
    store.codebooks.save(tmp_path / "codebooks")
    again = KVStore(SCHEMA, config("model", weighting="queries"))
    again.codebooks.load(tmp_path / "codebooks")
    loaded = again.create("other")
    append(loaded, make_rows(SCHEMA, 60, 3))
    for layer in range(SCHEMA.n_layers):
        np.testing.assert_array_equal(loaded._indexes[layer].index.codes, other._indexes[layer].index.codes)
        np.testing.assert_array_equal(weighting_of(loaded, layer).back, weighting_of(other, layer).back)


def test_many_queries_are_sampled_evenly():
    seq = KVStore(SCHEMA, config(weighting="queries")).create("book")
    many = queries(5000)
    seq.observe_queries(0, many)
    seen = seq._indexes[0]._queries._count / (SCHEMA.n_q_heads // HEADS)
    assert 512 < seen <= 1024
    whole = query_moments(grouped(many))
    assert np.abs(seq._indexes[0].query_moments - whole).max() < 0.15 * np.abs(whole).max()


def test_bad_queries_are_named_and_change_nothing():
    seq = KVStore(SCHEMA, config(weighting="queries")).create("book")
    with pytest.raises(SchemaMismatchError, match="queries must be"):
        seq.observe_queries(0, queries(3)[:1])
    with pytest.raises(SchemaMismatchError, match="not list"):
        seq.observe_queries(0, [1.0])
    with pytest.raises(NonFiniteError):
        seq.observe_queries(0, queries(3) * torch.inf)
    seq.observe_queries(0, queries(0))
    assert seq._indexes[0].query_moments is None
    with pytest.raises(ConfigError, match="weighting"):
        KVStore(SCHEMA, config(weighting="keys"))
    with pytest.raises(StepError):
        seq.append(0, *make_rows(SCHEMA, 1, 0)[0])
