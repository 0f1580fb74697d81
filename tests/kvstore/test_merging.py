"""Attention over parts of the rows, merged, is attention over all of them."""

import doctest
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore.merging
from kvstore import KVStore, Schema, SchemaMismatchError, StoreConfig
from kvstore.merging import merge_attention
from tests.builders import SCHEMA, append, cut, flat_config, make_query, make_rows, same_bits


def attention(scores, values):
    """One softmax over all rows: scores [..., n], values [..., n, dim] -> out [..., dim], log norm [...]."""
    norm = torch.logsumexp(scores, -1)
    return ((scores - norm[..., None]).exp()[..., None] * values).sum(-2), norm


@st.composite
def cut_rows(draw):
    """Scores, values, and the borders of 1 to 5 parts, some of which may be empty."""
    n = draw(st.integers(1, 40))
    seed, size = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 3.0, 60.0]))
    generator = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(3, n, generator=generator, dtype=torch.float64)
    values = torch.randn(3, n, 4, generator=generator, dtype=torch.float64)
    borders = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
    return scores, values, [0, *borders, n]


@settings(deadline=None, max_examples=150)
@given(cut_rows(), st.sampled_from(["torch", "numpy"]), st.sampled_from([torch.float32, torch.float64]))
def test_any_cut_of_the_rows_merges_to_attention_over_all(case, library, dtype):
    scores, values, borders = case
    expected, expected_norm = attention(scores, values)
    outs, norms = [], []
    for start, stop in pairwise(borders):
        out, norm = attention(scores[:, start:stop], values[:, start:stop])
        outs.append(out.to(dtype) if stop > start else torch.full_like(out, torch.nan).to(dtype))
        norms.append(norm.to(dtype))
    if library == "numpy":
        found, norm = merge_attention([x.numpy() for x in outs], [x.numpy() for x in norms])
        assert isinstance(found, np.ndarray)
        found, norm = torch.from_numpy(found), torch.from_numpy(norm)
    else:
        found, norm = merge_attention(outs, norms)
    assert found.dtype == norm.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(norm.double(), expected_norm, atol=tolerance, rtol=tolerance)


@given(st.permutations(range(4)))
def test_merging_in_steps_and_in_any_order_is_merging_at_once(order):
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
    norms = 5 * torch.randn(4, 2, generator=generator, dtype=torch.float64)
    out, norm = outs[order[0]], norms[order[0]]
    for i in order[1:]:
        out, norm = merge_attention([out, outs[i]], [norm, norms[i]])
    for found, expected in zip((out, norm), merge_attention(outs, norms), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_one_part_stays_as_it_is_and_no_rows_give_zero():
    outs, norms = torch.randn(1, 2, 3).half(), torch.tensor([[0.5, -torch.inf]])
    out, norm = merge_attention(outs, norms)
    assert torch.equal(out[0], outs[0, 0])
    assert out[1].tolist() == [0, 0, 0]
    assert torch.equal(norm, norms[0])


@pytest.mark.parametrize(
    ("outs", "norms"),
    [
        ([], []),
        ([torch.zeros(2, 3)], [torch.zeros(3)]),
        ([torch.zeros(2, 3)], []),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(2)] * 2),
        (torch.zeros(2), torch.zeros(2)),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(outs, norms):
    with pytest.raises(SchemaMismatchError, match="at least one part"):
        merge_attention(outs, norms)


def test_stores_that_hold_parts_of_the_rows_merge_to_the_store_of_all():
    schema = Schema(n_layers=1, n_q_heads=4, n_kv_heads=2, head_dim=8)
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(2, 90, 8, generator=generator) for _ in range(2))
    q = torch.randn(4, 8, generator=generator)
    outs, norms = [], []
    for rows in (slice(0, 30), slice(30, 31), slice(31, 90), slice(0, 90)):
        seq = KVStore(schema, StoreConfig(budget=None)).create("part")
        with seq.step():
            seq.append(0, keys[:, rows], values[:, rows])
        outs.append(seq.attend(0, q))
        scores = schema.scale * torch.einsum("hgd,hnd->hgn", q.view(2, 2, 8), keys[:, rows])
        norms.append(torch.logsumexp(scores, -1).view(4))
    out, norm = merge_attention(outs[:3], norms[:3])
    torch.testing.assert_close(out, outs[3], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norm, norms[3])


def test_the_example():
    assert doctest.testmod(kvstore.merging).failed == 0


@pytest.mark.parametrize("n_parts", [1, 2, 5])
def test_stores_that_hold_parts_of_the_rows_attend_as_one(n_parts):
    rows, q = make_rows(SCHEMA, 300, 1), make_query(SCHEMA, 2)
    whole = KVStore(SCHEMA, flat_config(budget=None)).create("all")
    append(whole, rows)
    cuts, outs, norms = [300 * i // n_parts for i in range(n_parts + 1)], [], []
    for start, stop in pairwise(cuts):
        part = KVStore(SCHEMA, flat_config(budget=None)).create("part")
        append(part, cut(rows, start, stop), np.arange(start, stop))
        out, norm = part.attend_with_log_norm(1, q)
        assert same_bits(out, part.attend(1, q))
        outs.append(out)
        norms.append(norm)
    merged, norm = merge_attention(outs, norms)
    out, whole_norm = whole.attend_with_log_norm(1, q)
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm, whole_norm, rtol=1e-6, atol=1e-5)
