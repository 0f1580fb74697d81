"""Queries for a share of the mass and for all rows near the best, against a float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import IndexConfig, InvalidQueryError, KVStore, Schema, StoreConfig

N = 900
SCHEMA = Schema(n_layers=1, n_q_heads=4, n_kv_heads=2, head_dim=16, block_tokens=16)
INDEX = IndexConfig(options={"m": 2, "bits": 4}, min_rows=64, append_rows=8)


def filled(kind: str) -> tuple[KVStore, np.ndarray]:
    config = StoreConfig(sinks=2, window=16, index=INDEX if kind == "pq" else IndexConfig(kind="flat"))
    store = KVStore(SCHEMA, config)
    keys = torch.randn(2, N, 16, generator=torch.Generator().manual_seed(5))
    seq = store.create("book")
    with seq.step():
        seq.append(0, keys, keys)
    return store, keys.double().numpy()


def shares(keys: np.ndarray, q: torch.Tensor) -> np.ndarray:
    """Mean over the query heads of the softmax over all rows, float64 [N]."""
    scores = SCHEMA.scale * q.double().reshape(-1, 16).numpy() @ keys.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 1.0), st.booleans(), st.integers(0, 1), st.integers(0, 99))
def test_mass_returns_the_fewest_rows_that_hold_it(mass: float, grouped: bool, head: int, seed: int) -> None:
    store, keys = filled("flat")
    q = 2 * torch.randn((2, 16) if grouped else (16,), generator=torch.Generator().manual_seed(seed))
    found = store.topk(0, head, q, mass=mass)
    share = shares(keys[head], q)
    best = np.sort(share)[::-1].cumsum()
    assert found.exact
    assert share[found.positions.numpy()].sum() >= mass - 1e-5
    assert abs(len(found) - (int(np.searchsorted(best, min(mass, best[-1]))) + 1)) <= (3 if mass > 0.999 else 1)
    np.testing.assert_allclose(found.scores.numpy() / (2 if grouped else 1), share[found.positions], atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.0, 30.0), st.integers(0, 1), st.integers(0, 99))
def test_range_returns_every_row_within_beta_of_the_best(beta: float, head: int, seed: int) -> None:
    store, keys = filled("flat")
    q = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    found = store.range(0, head, q, beta)
    scores = keys[head] @ q.double().numpy()
    near = set(np.flatnonzero(scores >= scores.max() - beta + 1e-4))
    assert near <= set(found.positions.tolist()) <= set(np.flatnonzero(scores >= scores.max() - beta - 1e-4))
    assert (found.scores.diff() <= 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_with_an_index_the_rows_found_hold_the_mass_that_they_claim(seed: int) -> None:
    store, keys = filled("pq")
    assert store["book"]._indexes[0].index is not None
    q = 5 * torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
    found = store.topk(0, 1, q, mass=0.6)
    share = shares(keys[1], q)[found.positions.numpy()]
    np.testing.assert_allclose(found.scores.numpy() / 2, share, rtol=1e-3, atol=1e-6)  # the sample is all the rest here
    assert share.sum() >= 0.6 - 1e-3


def test_with_an_index_range_finds_most_of_what_an_exact_scan_finds() -> None:
    store, _ = filled("pq")
    q = 2 * torch.randn(16, generator=torch.Generator().manual_seed(1))
    exact = store.range(0, 1, q, 6.0, exact=True)
    near = store.range(0, 1, q, 6.0)
    assert set(near.positions.tolist()) <= set(exact.positions.tolist())
    assert len(near) > 0.6 * len(exact)


def test_an_empty_sequence_has_nothing_to_find() -> None:
    store = KVStore(SCHEMA)
    store.create("empty")
    assert len(store.topk(0, 0, torch.ones(16), mass=0.5)) == 0
    assert len(store.range(0, 0, torch.ones(16), 1.0)) == 0


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda s, q: s.topk(0, 0, q), "k must be"),
        (lambda s, q: s.topk(0, 0, q, 3, mass=0.5), "not both"),
        (lambda s, q: s.topk(0, 0, q, mass=0.0), "(0, 1]"),
        (lambda s, q: s.topk(0, 0, q, mass=1.5), "(0, 1]"),
        (lambda s, q: s.topk(0, 0, q, mass=float("nan")), "(0, 1]"),
        (lambda s, q: s.topk(0, 0, q, mass=0.5, reduce="max"), "reduce"),
        (lambda s, q: s.range(0, 0, q, -1.0), "beta"),
        (lambda s, q: s.range(0, 0, q, float("inf")), "beta"),
    ],
)
def test_bad_modes_raise_one_clear_error(call, part: str) -> None:
    store, _ = filled("flat")
    with pytest.raises(InvalidQueryError) as error:
        call(store, torch.ones(16))
    assert part in str(error.value)
