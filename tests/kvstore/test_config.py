import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import ConfigError, IndexConfig, StoreConfig
from kvstore.budget import budget_rows, check_budget

WRONG_BUDGETS = [0, -3, 0.0, -0.1, 1.5, math.nan, math.inf, True, False, "half", [1]]


@pytest.mark.parametrize("budget", WRONG_BUDGETS, ids=repr)
def test_a_budget_is_a_share_or_a_number_of_rows_or_none(budget):
    with pytest.raises(ConfigError, match="budget"):
        check_budget(budget)
    with pytest.raises(ConfigError, match="budget"):
        StoreConfig(budget=budget)


@pytest.mark.parametrize("budget", [None, 1, 10**9, 1.0, 1e-9])
def test_a_budget_in_range_is_accepted(budget):
    check_budget(budget)
    assert StoreConfig(budget=budget).budget == budget


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_min=True))
def test_a_share_is_rounded_and_never_nothing_and_never_more_than_all(n_rows, share):
    rows = budget_rows(share, n_rows)
    assert 1 <= rows <= n_rows
    assert rows == 1 or abs(rows - share * n_rows) <= 0.5


@given(st.integers(1, 10**6), st.integers(1, 10**7))
def test_a_number_of_rows_is_capped_at_the_length(n_rows, budget):
    assert budget_rows(budget, n_rows) == min(budget, n_rows)
    assert budget_rows(None, n_rows) == n_rows


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"sinks": -1}, "sinks must be >= 0 .* -1"),
        ({"window": 0}, "window >= 1, not 4 and 0"),
        ({"reduce": "median"}, "sum_softmax, max, mean, not 'median'"),
        ({"min_selected": 0}, "min_selected must be at least 1, not 0"),
        ({"dense_rows": -1}, "dense_rows must not be negative, got -1"),
        ({"arena_bytes": 0}, "arena_bytes must be positive"),
        ({"heap_bytes": -1}, "heap_bytes and pool_bytes not negative"),
        ({"pool_bytes": -1}, "heap_bytes and pool_bytes not negative"),
        ({"pool_policy": "mru"}, "mru"),
    ],
)
def test_a_wrong_store_setting_is_named(changes, fragment):
    with pytest.raises(ConfigError, match=fragment):
        StoreConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"min_rows": 0}, "min_rows and append_rows must be at least 1, not 0 and 32"),
        ({"append_rows": 0}, "not 256 and 0"),
        ({"over_fetch": 0.5}, "over_fetch must be at least 1, not 0.5"),
        ({"over_fetch": math.nan}, "over_fetch"),
        ({"over_fetch": math.inf}, "over_fetch"),
    ],
)
def test_a_wrong_index_setting_is_named(changes, fragment):
    with pytest.raises(ConfigError, match=fragment):
        IndexConfig(**changes)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StoreConfig().sinks = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        IndexConfig().seed = 1


def test_two_configs_do_not_share_their_options():
    assert IndexConfig().options is not IndexConfig().options
