import json

import pytest
import torch

from kvstore import InvalidQueryError, KVStore, Schema
from tests import oracles
from tests.builders import SCHEMA, contents, fill, filled, flat_config, make_query, pq_config

Q = make_query(SCHEMA, 0)


def read_by(explained, n_heads=2):
    """Rows that the measured plan read, a list a KV head."""
    plan = explained.plan
    kept = [*range(plan.first, plan.sinks_stop)], [*range(plan.tail_start, plan.n_rows)]
    return [[*kept[0], *explained.measured.chosen[head].tolist(), *kept[1]] for head in range(n_heads)]


def test_a_dense_plan_says_why_and_what_it_reads():
    _, seq, _ = filled(SCHEMA, flat_config(), 30)
    text = str(seq.explain(1, Q))
    assert "Attend layer=1 sequence='book'  rows 30 of 30 (100.0%)  plan: dense, 30 rows, dense up to 32" in text
    assert "Softmax rows=[0,30)" in text
    assert f"{30 * 2 * 32 * 4 / 1024:.1f} KiB of rows" in text
    assert "ms" not in text
    assert "the budget is all rows" in str(seq.explain(1, Q, budget=None))


def test_a_flat_plan_names_its_ranges():
    _, seq, _ = filled(SCHEMA, flat_config(), 100)
    explained = seq.explain(0, Q)
    text = str(explained)
    assert explained.plan.method == "flat"
    assert "rows 24 of 100 (24.0%)  plan: flat, no index" in text
    assert "sinks=[0,2) tail=[92,100)" in text
    assert "Scan flat rows=[2,92) -> 14 a KV head" in text
    assert explained.index is None


def test_an_index_plan_names_the_index_and_the_rerank():
    _, seq, _ = filled(SCHEMA, pq_config(), 100)
    explained = seq.explain(0, Q)
    text = str(explained)
    assert explained.plan.method == "index"
    assert "Rerank 28 -> 14 a KV head" in text
    assert "Scan pq m=2 bits=4" in text
    assert "rows=[2,92)" in text
    assert explained.index["kind"] == "pq"
    assert explained.index["rows"] == 90


def test_a_budget_given_to_explain_is_planned_with():
    _, seq, _ = filled(SCHEMA, flat_config(), 100)
    assert seq.explain(0, Q, budget=50).plan.n_attended == 50
    assert seq.explain(0, Q, budget=1.0).plan.method == "dense"
    seq.budget = 60
    assert seq.explain(0, Q).plan.n_attended == 60


@pytest.mark.parametrize("config", [flat_config(), pq_config()], ids=["flat", "pq"])
@pytest.mark.parametrize("n", [1, 30, 43, 100, 500])
def test_the_mass_caught_is_that_of_the_full_softmax(config, n):
    _, seq, rows = filled(SCHEMA, config, n)
    for layer, (keys, _) in enumerate(rows):
        explained = seq.explain(layer, Q, analyze=True)
        read = read_by(explained)
        assert all(len(r) == len(set(r)) == explained.plan.n_attended for r in read)
        assert explained.measured.mass == pytest.approx(oracles.mass(Q, keys, 0.25, read), abs=1e-5)
        assert explained.measured.search_ms >= 0
        assert explained.measured.attend_ms > 0


def test_the_mass_of_the_middle_leaves_out_what_is_always_read():
    _, seq, rows = filled(SCHEMA, flat_config(), 100)
    measured = seq.explain(0, Q, analyze=True).measured
    middle = rows[0][0][:, 2:92]
    chosen = [(measured.chosen[head] - 2).tolist() for head in range(2)]
    assert measured.middle_mass == pytest.approx(oracles.mass(Q, middle, 0.25, chosen), abs=1e-5)
    assert 0 < measured.middle_mass < measured.mass < 1


def test_dense_attention_catches_everything():
    _, seq, _ = filled(SCHEMA, flat_config(), 100)
    measured = seq.explain(0, Q, analyze=True, budget=None).measured
    assert (measured.mass, measured.middle_mass) == (1.0, 1.0)
    assert measured.chosen.shape == (2, 0)


def test_padding_holds_no_mass():
    schema = Schema(1, 4, 2, 16, block_tokens=16)
    seq = KVStore(schema, flat_config()).create("padded", first_row=20)
    [(keys, _)] = fill(seq, 120)
    explained = seq.explain(0, Q, analyze=True)
    read = [[row - 20 for row in rows] for rows in read_by(explained)]
    assert min(min(rows) for rows in read) == 0
    assert explained.measured.mass == pytest.approx(oracles.mass(Q, keys[:, 20:], 0.25, read), abs=1e-5)
    assert "rows 24 of 100 (24.0%)" in str(explained)
    assert "sinks=[20,22)" in str(explained)


def test_with_analyze_the_text_says_what_happened():
    for config in (flat_config(), pq_config()):
        _, seq, _ = filled(SCHEMA, config, 100)
        explained = seq.explain(0, Q, analyze=True)
        text = str(explained)
        assert f"attention mass caught {explained.measured.mass:.4f}" in text
        assert f"of the middle {explained.measured.middle_mass:.4f}" in text
        assert " ms" in text.splitlines()[-1]


@pytest.mark.parametrize("config", [flat_config(), pq_config()], ids=["flat", "pq"])
@pytest.mark.parametrize("n", [10, 100])
@pytest.mark.parametrize("analyze", [True, False])
def test_an_explanation_is_ready_for_json(config, n, analyze):
    _, seq, _ = filled(SCHEMA, config, n)
    explained = seq.explain(1, Q, analyze=analyze)
    as_dict = explained.as_dict()
    assert json.loads(json.dumps(as_dict)) == as_dict
    assert as_dict["plan"]["n_attended"] == explained.plan.n_attended
    assert (as_dict["measured"] is None) == (not analyze)
    assert as_dict["sequence"] == "book"
    assert as_dict["layer"] == 1


def test_the_plan_explained_is_the_plan_run():
    store, seq, _ = filled(SCHEMA, pq_config(), 300)
    plan = seq.explain(0, Q).plan
    seq.attend(0, Q)
    counters = store.stats().counters
    assert counters.attends[plan.method] == 1
    assert counters.rows_attended == plan.n_attended


@pytest.mark.parametrize("analyze", [True, False])
def test_explaining_changes_nothing(analyze):
    store, seq, _ = filled(SCHEMA, pq_config(), 100)
    before = contents(store)
    seq.explain(0, Q, analyze=analyze)
    store.explain("book", 1, Q, analyze=analyze)
    store.explain(None, 1, Q, analyze=analyze)
    assert contents(store) == before


def test_inside_a_step_the_rows_just_appended_are_planned_for():
    _, seq, _ = filled(SCHEMA, flat_config(), 100)
    with seq.step():
        seq.append(0, torch.ones(2, 5, 16), torch.ones(2, 5, 16))
        assert seq.explain(0, Q).plan.n_rows == 105
        assert seq.explain(1, Q).plan.n_rows == 100
        seq.append(1, torch.ones(2, 5, 16), torch.ones(2, 5, 16))


def test_there_is_nothing_to_explain_without_rows():
    store = KVStore(SCHEMA, flat_config())
    seq = store.create("empty")
    with pytest.raises(InvalidQueryError, match="'empty' has no rows in layer 0"):
        seq.explain(0, Q)
