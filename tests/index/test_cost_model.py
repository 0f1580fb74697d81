"""Cost models: fits find the coefficients, T_max keeps its bounds, broken or foreign files are not believed."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.index import cost_cache
from kvstore.index.cost_cache import cached_clustering, machine_fingerprint
from kvstore.index.cost_model import (
    ClusteringCost,
    ComputeCost,
    clustering_of,
    fit_clustering,
    fit_compute,
    max_iterations,
)

COST = ClusteringCost(1e-3, 1e-7, 65536)
LENGTHS = [256, 512, 1024, 4096, 16384]
coefficients = st.floats(1e-12, 1.0)


# ---- T_max ----


def test_t_max_is_the_papers_formula():
    clustering, compute = ClusteringCost(1e-3, 2.613e-6 / 3), ComputeCost(4.2e-4, 2.54e-6, 4.75e-11)
    for rows in (3000, 8000, 16000, 65536, 131072):
        formula = (4.75e-11 * rows**2 + 2.54e-6 * rows + 4.2e-4 - 1e-3) / (2.613e-6 / 3 * rows)
        assert max_iterations(clustering, compute, rows, (1, 10**6)) == int(formula)


@given(coefficients, coefficients, coefficients, coefficients, coefficients, st.integers(0, 10**7), st.integers(1, 9))
def test_bounds_are_kept_and_clustering_hides_behind_compute(a1, b1, a2, b2, g2, rows, low):
    clustering, compute = ClusteringCost(a1, b1), ComputeCost(a2, b2, g2)
    found = max_iterations(clustering, compute, rows, (low, 25))
    assert low <= found <= 25
    if found > low:
        assert clustering.seconds(rows, found) <= compute.seconds(rows) * (1 + 1e-9)
    if low < found < 25:
        assert clustering.seconds(rows, found + 1) > compute.seconds(rows) * (1 - 1e-9)


@given(
    coefficients, coefficients, coefficients, coefficients, coefficients, st.integers(1, 10**6), st.integers(1, 10**6)
)
def test_longer_prompts_leave_more_time_from_a_length_on(a1, b1, a2, b2, g2, rows, more):
    """T_max grows where g2 s^2 > a2 - a1: from the first row on where starting the layer is cheaper than K-Means."""
    start = math.ceil(math.sqrt(max(0.0, a2 - a1) / g2))
    clustering, compute = ClusteringCost(a1, b1), ComputeCost(a2, b2, g2)
    rows += start
    bounds = (1, 10**9)
    assert max_iterations(clustering, compute, rows + more, bounds) + 1 >= max_iterations(
        clustering, compute, rows, bounds
    )


def test_rows_that_the_trainer_does_not_look_at_cost_nothing():
    cost = ClusteringCost(0.0, 1e-6, 1000)
    assert cost.seconds(5000, 3) == cost.seconds(1000, 3)
    compute = ComputeCost(0.0, 1e-6, 0.0)
    assert max_iterations(cost, compute, 1000) == 1
    assert max_iterations(cost, compute, 7500) == 7


@pytest.mark.parametrize("bounds", [(0, 5), (6, 5), (-1, 25)])
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ConfigError, match="bounds"):
        max_iterations(COST, ComputeCost(1, 1, 1), 100, bounds)


def test_free_iterations_are_as_many_as_allowed_and_none_are_spare_without_time():
    assert max_iterations(ClusteringCost(0.0, 0.0), ComputeCost(1.0, 0.0, 0.0), 100) == 25
    assert max_iterations(ClusteringCost(2.0, 0.0), ComputeCost(1.0, 0.0, 0.0), 100) == 1
    assert max_iterations(COST, ComputeCost(0.0, 0.0, 0.0), 0) == 1


# ---- fits ----


@given(st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-4), st.floats(1e-12, 1e-8))
def test_a_fit_finds_the_coefficients_of_exact_measurements(a, b, g):
    truth = ComputeCost(a, b, g)
    found = fit_compute((s, truth.seconds(s)) for s in LENGTHS)
    assert [found.seconds(s) for s in LENGTHS] == pytest.approx([truth.seconds(s) for s in LENGTHS], rel=1e-6)
    clustering = clustering_of([(s * t, a + b * s * t) for s in LENGTHS for t in (1, 5)])
    assert asdict(clustering) == pytest.approx({"start_s": a, "row_s": b, "limit_rows": 0}, rel=1e-4)


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.floats(1e-6, 10.0)), min_size=3, max_size=9, unique_by=lambda p: p[0])
)
def test_no_fit_has_negative_times(samples):
    found = fit_compute(samples)
    assert min(asdict(found).values()) >= 0
    assert np.isfinite(list(asdict(found).values())).all()
    cost = clustering_of(samples)
    assert cost.start_s >= 0
    assert cost.row_s >= 0


@pytest.mark.parametrize(
    "samples",
    [[], [(1, 1.0), (2, 1.0)], [(1, 1.0)] * 5, [(1, 1.0), (2, 2.0), (3, math.nan)], [(0, 1.0), (1, 1.0), (2, 1.0)]],
)
def test_too_few_or_impossible_measurements_are_refused(samples):
    with pytest.raises(ConfigError):
        fit_compute(samples)


def test_the_trainer_is_what_is_timed():
    """A clock that counts its calls: each training takes one tick, whatever the machine is doing."""
    ticks = iter(range(10**6))
    cost = fit_clustering(
        1, 8, sizes=(64, 128), iterations=(1, 2), repeats=2, clock=lambda: float(next(ticks)), m=1, bits=4
    )
    assert next(ticks) == 2 * 2 * 2 * 2
    assert cost.limit_rows == 256 * 16
    assert cost.seconds(100, 1) == pytest.approx(1.0)


def test_real_measurements_give_positive_finite_numbers():
    cost = fit_clustering(2, 16, sizes=(512, 1024), repeats=1, m=2, bits=4)
    assert 0 <= cost.start_s < math.inf
    assert 0 <= cost.row_s < math.inf
    with pytest.raises(ConfigError):
        fit_clustering(2, 16, sizes=(512,), iterations=(3,), m=2, bits=4)


# ---- on disk ----


def test_a_fit_is_kept_for_the_same_machine_and_settings(tmp_path):
    fits = []

    def fit():
        fits.append(1)
        return ClusteringCost(0.1 + len(fits), 1 / 3, 4096)

    here = machine_fingerprint(n_kv_heads=2, m=2)
    first = cached_clustering(here, fit, tmp_path)
    assert cached_clustering(here, fit, tmp_path) == first
    for other in (here | {"cpu": "another"}, here | {"cores": "999"}, here | {"numba": "0.1"}, here | {"m": "4"}):
        assert cached_clustering(other, fit, tmp_path) != first
    assert len(fits) == 5
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"fingerprint": {}}', "foreign", "nan", "negative", "text"]
)
def test_a_broken_file_is_fitted_again_and_replaced(content, tmp_path):
    here = machine_fingerprint()
    cached_clustering(here, lambda: COST, tmp_path)
    [path] = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    if content == "foreign":
        stored["fingerprint"]["cpu"] = "another"
    elif content in ("nan", "negative", "text"):
        stored["cost"]["row_s"] = {"nan": math.nan, "negative": -1.0, "text": "fast"}[content]
    path.write_text(json.dumps(stored) if content in ("foreign", "nan", "negative", "text") else content)
    again = ClusteringCost(5.0, 6.0, 7)
    assert cached_clustering(here, lambda: again, tmp_path) == again
    assert cached_clustering(here, lambda: COST, tmp_path) == again


def test_a_directory_that_cannot_be_written_only_means_that_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert cached_clustering(machine_fingerprint(), lambda: COST, tmp_path / "file" / "costs") == COST


def test_a_fit_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached_clustering(machine_fingerprint(), lambda: 1 // 0, tmp_path)  # type: ignore[arg-type, return-value]
    assert not list(tmp_path.iterdir())


def test_the_users_cache_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached_clustering(machine_fingerprint(), lambda: COST)
    [path] = (tmp_path / "kvstore" / "costs").iterdir()
    assert path.name.startswith("clustering-")


def test_the_fingerprint_names_the_machine_and_the_settings(monkeypatch):
    found = machine_fingerprint(head_dim=64, m=2, bits=6)
    assert set(found) == {"format", "cpu", "cores", "numba", "torch", "head_dim", "m", "bits"}
    assert all(isinstance(text, str) for text in found.values())
    monkeypatch.setattr(cost_cache, "_cores", lambda: 12345)
    assert machine_fingerprint(head_dim=64, m=2, bits=6) != found
