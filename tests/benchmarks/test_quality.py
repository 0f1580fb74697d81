from dataclasses import replace

import numpy as np
import pytest

from benchmarks.control import KIND, RandomIndex, register_control
from benchmarks.quality import Place, index_configs, measure_quality
from kvstore import IndexConfig

pytestmark = pytest.mark.hf


def quiet(line):
    pass


def test_a_budget_that_covers_everything_costs_nothing(model, ids, config):
    flat = replace(config, index=IndexConfig(kind="flat"))
    scores = measure_quality(model, [Place(ids, 100, 10)], [1.0], {"flat": flat}, quiet)[1.0, "flat"]
    assert abs(scores.kl) < 1e-5
    assert scores.agreement == 1.0
    assert abs(scores.delta_nll) < 1e-3


def test_selection_differs_from_full_attention_and_random_rows_more_so(model, ids, config):
    register_control()
    configs = {
        "flat": replace(config, index=IndexConfig(kind="flat")),
        "random": replace(config, index=IndexConfig(kind=KIND, over_fetch=1.0, min_rows=64)),
    }
    spots = [Place(ids[start:], 200, 12) for start in (0, 100)]
    found = measure_quality(model, spots, [0.2], configs, quiet)
    assert 0 < found[0.2, "flat"].kl < found[0.2, "random"].kl


def test_settings_compared_differ_in_the_index_alone():
    configs = list(index_configs().values())
    assert len({config.index.kind for config in configs}) == len(configs) == 3
    plain = replace(configs[0], index=IndexConfig())
    assert all(replace(config, index=IndexConfig()) == plain for config in configs)


def test_random_index_returns_other_rows_with_another_seed():
    keys = np.zeros((2, 100, 4), np.float32)
    q = np.zeros((2, 3, 4), np.float32)
    rows = []
    for seed in (1, 1, 2):
        index = RandomIndex(2, 4, first_row=5, seed=seed)
        index.add(keys)
        found = index.search(q, 10, None, scale=1.0).rows
        assert found.shape == (2, 10)
        assert found.min() >= 5
        assert found.max() < 105
        assert all(len(set(line)) == 10 for line in found.tolist())
        rows.append(found.tolist())
    assert rows[0] == rows[1] != rows[2]
    assert index.clone().n_rows == 100
