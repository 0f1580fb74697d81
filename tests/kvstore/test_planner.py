import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore import IndexConfig, StoreConfig
from kvstore.budget import budget_rows
from kvstore.planner import DENSE, FLAT, INDEX, plan_attention

BUDGETS = st.one_of(st.none(), st.integers(1, 3000), st.floats(0.001, 1.0))
CONFIGS = st.builds(
    StoreConfig,
    sinks=st.integers(0, 40),
    window=st.integers(1, 100),
    min_selected=st.integers(1, 50),
    dense_rows=st.integers(0, 300),
    index=st.builds(IndexConfig, over_fetch=st.floats(1.0, 8.0)),
)


@st.composite
def questions(draw):
    """A config, a budget, a first row, a length and, if an index is there, the rows it covers."""
    config, first = draw(CONFIGS), draw(st.integers(0, 50))
    n_rows = first + draw(st.integers(1, 2000))
    start, stop = first + config.sinks, n_rows - config.window
    covered = None
    if draw(st.booleans()) and start <= stop:
        covered = (start, draw(st.integers(start, stop)))
    return config, draw(BUDGETS), first, n_rows, covered


@given(questions())
def test_the_rows_read_are_within_the_budget_or_the_floor(question):
    config, budget, first, n_rows, _covered = question
    plan = plan_attention(*question)
    kept = n_rows - first - plan.n_middle
    if plan.method != DENSE:
        assert plan.n_attended == max(budget_rows(budget, n_rows - first), kept + config.min_selected)
    assert 1 <= plan.n_attended <= n_rows - first


@given(questions())
def test_ranges_are_ordered_and_inside_the_table(question):
    _, _, first, n_rows, covered = question
    plan = plan_attention(*question)
    assert (plan.first, plan.n_rows) == (first, n_rows)
    assert first <= plan.sinks_stop <= plan.tail_start <= n_rows
    assert 0 <= plan.n_selected <= plan.n_candidates <= plan.n_middle
    if plan.method == INDEX:
        assert (plan.sinks_stop, plan.tail_start) == covered


@given(questions())
def test_sinks_and_window_are_always_kept(question):
    config, _, first, n_rows, _ = question
    plan = plan_attention(*question)
    assert plan.sinks_stop >= min(first + config.sinks, n_rows)
    if plan.method != DENSE:
        assert n_rows - plan.tail_start >= config.window


@given(questions())
@example((StoreConfig(), 1.0, 0, 5000, None))
def test_a_budget_that_covers_all_rows_is_dense(question):
    config, _budget, first, n_rows, covered = question
    for enough in (None, 1.0, n_rows - first):
        plan = plan_attention(config, enough, first, n_rows, covered)
        assert plan.method == DENSE
        assert plan.n_attended == n_rows - first
        assert plan.n_middle == plan.n_selected == plan.n_candidates == 0


@given(questions())
def test_short_sequences_are_dense_and_the_limit_counts_no_padding(question):
    config, _budget, first, n_rows, _covered = question
    plan = plan_attention(*question)
    if n_rows - first <= config.dense_rows:
        assert plan.method == DENSE


def test_one_row_above_the_dense_limit_is_selected_from():
    config = StoreConfig(dense_rows=300, budget=0.1, sinks=4, window=16, min_selected=8)
    assert plan_attention(config, 0.1, 0, 300, None).method == DENSE
    assert plan_attention(config, 0.1, 0, 301, None).method == FLAT
    assert plan_attention(config, 0.1, 7, 307, None).method == DENSE
    assert plan_attention(config, 0.1, 7, 308, None).method == FLAT


@given(questions())
def test_only_an_index_needs_more_candidates_than_it_selects(question):
    config = question[0]
    plan = plan_attention(*question)
    if plan.method == FLAT:
        assert plan.n_candidates == plan.n_selected
    if plan.method == INDEX:
        assert plan.n_candidates == min(plan.n_middle, round(config.index.over_fetch * plan.n_selected))


@given(questions(), st.integers(1, 500))
def test_a_larger_budget_never_reads_fewer_rows(question, more):
    config, _, first, n_rows, covered = question
    reads = [plan_attention(config, b, first, n_rows, covered).n_attended for b in (more, more + 1, 2 * more, None)]
    assert reads == sorted(reads)


@pytest.mark.parametrize("covered", [None, (104, 1036)])
def test_padding_does_not_count_towards_a_share(covered):
    plan = plan_attention(StoreConfig(sinks=4, window=64), 0.1, 100, 1100, covered)
    assert (plan.method, plan.n_attended) == (INDEX if covered else FLAT, 100)


def test_a_budget_is_spent_to_the_row():
    plan = plan_attention(StoreConfig(sinks=4, window=64), 200, 0, 5000, None)
    assert (plan.method, plan.n_attended, plan.n_selected) == (FLAT, 200, 132)
    plan = plan_attention(StoreConfig(sinks=4, window=64), 200, 0, 5000, (4, 4900))
    assert (plan.method, plan.n_attended, plan.n_selected, plan.n_candidates) == (INDEX, 200, 96, 192)
