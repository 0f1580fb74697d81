import pytest
import torch

from benchmarks.engines import DYNAMIC, STORE
from benchmarks.memory import Probe, measure_memory, peak_bytes, run_probe
from tests.benchmarks.tiny import tiny_model

pytestmark = pytest.mark.hf


def probe(engine, ids):
    return Probe(tiny_model, engine, 0.2 if engine == STORE else None, ids[:120].tolist(), 100, torch.get_num_threads())


@pytest.mark.parametrize("engine", [DYNAMIC, STORE])
def test_usage_is_that_of_a_process_and_of_its_cache(engine, ids):
    usage = run_probe(probe(engine, ids))
    assert usage.peak_bytes > usage.held_bytes
    assert usage.held_bytes >= 120 * 2 * 2 * 64 * 4


def test_peak_grows_with_what_is_allocated():
    before = peak_bytes()
    block = bytearray(64 << 20)
    block[::4096] = b"\1" * len(block[::4096])
    del block
    assert peak_bytes() >= before


@pytest.mark.slow
def test_a_fresh_process_does_not_count_this_one(ids):
    ballast = torch.ones(256 << 20, dtype=torch.uint8)  # 256 MiB
    usage = measure_memory(probe(DYNAMIC, ids))
    assert 0 < usage.held_bytes < usage.peak_bytes
    assert usage.peak_bytes < peak_bytes()
    del ballast
