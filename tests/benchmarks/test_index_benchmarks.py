"""The index benchmarks at sizes where only their shape matters."""

import math

import numpy as np
import pytest

from benchmarks import index_quality, kmeans, topk
from benchmarks.faiss_peers import FAST_SCAN, PQ, RABITQ, FaissKind, all_scores, code_bytes, kinds_of_bytes
from benchmarks.report import Report, check_report
from benchmarks.synthetic import make_rows
from tests.traces import make_trace

pytest.importorskip("faiss", reason="compared with FAISS")


def quiet(line):
    pass


@pytest.fixture
def report():
    return Report("test", {"cpu": "any"})


def test_synthetic_keys_are_the_same_each_time_and_clustered():
    rows, again = make_rows(2, 500, 16), make_rows(2, 500, 16)
    assert np.array_equal(rows.keys, again.keys)
    assert rows.keys.shape == (2, 500, 16)
    assert rows.q.shape == (2, 4, 16)
    assert not np.array_equal(rows.keys[0], rows.keys[1])
    assert not np.array_equal(rows.keys, make_rows(2, 500, 16, seed=1).keys)
    lengths = np.square(rows.keys[0]).reshape(500, 2, 8).sum(1).mean(0)  # of RoPE's pairs
    assert lengths.max() > 5 * np.median(lengths)


def test_topk_rows(report):
    options = topk.Options(n=2000, heads=2, group=2, head_dim=32, shares=(0.1,), rounds=1, lengths=(1000, 3000))
    topk.run_topk(options, report, quiet)
    check_report(report.as_dict())
    peers = {row.peer for row in report.rows}
    assert {topk.EXACT32, topk.EXACT16, "FAISS IndexPQ 1x8", "FAISS IndexPQFastScan 4x4"} <= peers
    exact = [row for row in report.rows if row.metric == topk.RECALL.name and row.peer == topk.EXACT32]
    assert all(row.peer_value == 1.0 and 0.1 < row.ours <= 1.0 for row in exact)
    assert len([row for row in report.rows if row.unit == topk.PER_KEY.unit]) == 8  # two lengths


def test_kmeans_rows(report):
    options = kmeans.Options(lengths=(2000,), head_dims=(32,), sizes=((2, 4),), heads=2, rounds=2)
    kmeans.run_kmeans(options, report, quiet)
    check_report(report.as_dict())
    errors = {row.peer: (row.ours, row.peer_value) for row in report.rows if row.metric == kmeans.ERROR.name}
    assert set(errors) == {kmeans.FAISS, kmeans.SKLEARN}
    assert all(0 < ours < 1.1 * theirs < 1.1 for ours, theirs in errors.values())
    assert [row.case for row in report.rows if row.metric == kmeans.ENCODE.name] == ["1 head x 2000 keys of 32, 1x8"]


def test_index_quality_rows(report, monkeypatch):
    methods = index_quality.methods(16)
    assert {"rope 1x8", "raw 2x6", index_quality.PAPER} <= set(methods)
    few = {name: methods[name] for name in ("rope 1x8", "raw 4x8")}
    monkeypatch.setattr(index_quality, "methods", lambda head_dim: few)
    traces, others = [make_trace(n=500)], [make_trace(n=400, seed=4)]
    index_quality.run_quality(traces, others, index_quality.Options(shares=(0.1,)), report, quiet)
    check_report(report.as_dict())
    found = {(row.case, row.peer): row for row in report.rows if row.metric == index_quality.MID.name}
    plain = found["rope 1x8 (1 B), 1/10", index_quality.EXACT]
    assert 0 < plain.ours < plain.peer_value
    assert ("raw 4x8 (4 B), 1/10", "FAISS IndexPQ 4x8") in found
    assert ("raw 4x8 (4 B), 1/10", "FAISS IndexPQFastScan 8x4") in found
    assert ("rope 1x8 (1 B), another text's codebook, 1/10", index_quality.EXACT) in found
    assert ("raw 4x8 (4 B), first-half codebook, 1/10", "the same, fresh codebook") in found
    assert all(math.isfinite(row.ours) for row in report.rows)


@pytest.mark.hf
def test_kl_rows(report, model, ids, config):
    from dataclasses import replace

    from benchmarks.quality import DEFAULT, EXACT
    from kvstore import IndexConfig

    configs = {DEFAULT: config, EXACT: replace(config, index=IndexConfig(kind="flat"))}
    options = index_quality.Options(kl_places=1, kl_context=200, kl_tokens=6, kl_budgets=(0.2,))
    index_quality.run_kl(model, ids, options, report, quiet, configs)
    [row] = report.rows
    assert row.peer == EXACT
    assert row.ours > 0 < row.peer_value


def test_faiss_kinds_spend_what_they_are_asked_to():
    assert kinds_of_bytes(1, 64) == [FaissKind(PQ, 1, 8), FaissKind(FAST_SCAN, 2, 4)]
    assert FaissKind(RABITQ) in kinds_of_bytes(16, 64)
    assert kinds_of_bytes(12.5, 64) == []
    for kind in kinds_of_bytes(16, 64):
        assert code_bytes(kind.make(64)) == 16


def test_all_scores_of_faiss_are_in_row_order():
    keys = np.random.default_rng(0).standard_normal((1, 300, 16)).astype(np.float32)
    [index] = FaissKind(PQ, 4, 4).build(keys)
    decoded = index.reconstruct_n(0, 300)
    assert np.allclose(all_scores(index, keys[0, :2]), keys[0, :2] @ decoded.T, atol=1e-4)
