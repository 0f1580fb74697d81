import json

from benchmarks.machine import PACKAGES, describe_machine


def test_machine_is_described_in_plain_values():
    machine = describe_machine()
    assert json.loads(json.dumps(machine, allow_nan=False)) == machine
    assert machine["cpu"]
    assert machine["cores"] >= machine["usable_cores"] >= 1
    assert machine["memory_gib"] > 0
    assert machine["torch_threads"] >= 1
    assert machine["numba_threads"] >= 1
    assert all(machine[package] for package in PACKAGES)
