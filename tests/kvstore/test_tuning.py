import json
from dataclasses import asdict

import pytest

from kvstore import ConfigError, KVStore, Schema, StoreConfig
from kvstore.config import config_from_dict
from kvstore.quality import Method, Quality
from kvstore.tuning import OVER_FETCHES, Trial, Tuning, default_grid, method_name, tune, with_front
from tests.traces import ROPE, make_trace


def quiet(stage, done, total):
    pass


@pytest.fixture(scope="module")
def found():
    methods = [Method("pq", {"space": s, "m": m, "bits": 4}) for s, m in (("rope", 1), ("raw", 1), ("raw", 8))]
    return tune([make_trace(n=500), make_trace(n=500, seed=1)], methods, 0.1, quiet)


def test_every_method_is_tried_with_every_over_fetch(found):
    assert len(found.trials) == 3 * len(OVER_FETCHES)
    assert all(0 < trial.quality.mid <= found.exact.mid + 1e-4 for trial in found.trials)
    assert all(trial.search_ms > 0 for trial in found.trials)
    assert {trial.bytes_per_key for trial in found.trials} == {1.0, 4.0}
    assert found.exact.rec == 1.0


def trial(n_bytes, mid, ms=1.0):
    return Trial(f"{n_bytes}", Method("pq", {"m": n_bytes}), Quality(mid, mid, mid, 1 - mid), n_bytes, ms)


def test_the_front_holds_what_nothing_beats_in_both():
    trials = with_front([trial(4, 0.9), trial(1, 0.5), trial(1, 0.7), trial(2, 0.6), trial(8, 0.9), trial(9, 0.95)])
    assert [(t.bytes_per_key, t.quality.mid) for t in trials if t.on_front] == [(1, 0.7), (4, 0.9), (9, 0.95)]


def test_the_smallest_good_enough_is_chosen_else_the_best():
    exact = Quality(0.9, 0.9, 1.0, 0.1)
    good = Tuning(0.1, exact, (trial(1, 0.8), trial(2, 0.895, 2.0), trial(2, 0.892, 1.0), trial(8, 0.9)))
    assert (good.chosen.bytes_per_key, good.chosen.search_ms) == (2, 1.0)
    assert Tuning(0.1, exact, (trial(1, 0.5), trial(2, 0.6))).chosen.bytes_per_key == 2


def test_the_config_survives_json_and_makes_a_store(found):
    config = config_from_dict(json.loads(json.dumps(asdict(found.config))))
    assert config == found.config
    assert config.budget == 0.1
    assert config.index.over_fetch == found.chosen.method.over_fetch
    KVStore(Schema(1, 4, 2, 16, rope=(ROPE,)), config).close()
    again = json.loads(json.dumps(found.as_dict()))
    assert config_from_dict(again["config"]) == config
    assert len(again["trials"]) == len(found.trials)


@pytest.mark.parametrize("data", [{"sink": 4}, {"index": {"colour": 1}}, {"index": 3}, {"sinks": "four"}])
def test_settings_that_are_none_are_refused(data):
    with pytest.raises(ConfigError):
        config_from_dict(data)


def test_settings_may_be_left_out():
    assert config_from_dict({}) == StoreConfig()


def test_the_grid_fits_the_trace():
    grid = default_grid(make_trace(n=100))
    assert {method.options["space"] for method in grid if method.kind == "pq"} == {"rope", "raw"}
    assert {method.kind for method in grid} >= {"pq", "sq4"}
    bare = default_grid(make_trace(n=100, rope=None), ["pq"])
    assert {(method.kind, method.options["space"]) for method in bare} == {("pq", "raw")}
    with pytest.raises(ConfigError, match="'nothing'"):
        default_grid(make_trace(n=100), ["pq", "nothing"])


@pytest.mark.parametrize(("budget", "methods"), [(0.0, [Method("pq")]), (1.0, [Method("pq")]), (0.1, [])])
def test_bad_tunings_are_refused(budget, methods):
    with pytest.raises(ConfigError):
        tune([make_trace(n=200)], methods, budget, quiet)


def test_names():
    assert method_name(Method("sq4")) == "sq4"
    assert method_name(Method("page", {"rows": 16}, 2.0)) == "page rows=16, over-fetch 2"
