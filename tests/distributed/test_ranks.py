"""Two and four ranks on this machine, each with the store of its part, give what one store of everything gives."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.builders import same_bits
from tests.distributed.cases import CONFIGS, whole

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch without gloo"
)


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def found(request, tmp_path_factory):
    """What the ranks gathered: (by_heads or by_layers, configuration) -> answers."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)], cwd=ROOT, env=environment, stderr=subprocess.PIPE
        )
        for rank in range(world)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)
    return torch.load(folder / "found.pt")


@cache
def single(name):
    return whole(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", ["by_heads", "by_layers"])
def test_the_parts_together_are_the_whole_bit_for_bit(found, how, name):
    for key, expected in single(name).items():
        part = found[how, name][key]
        assert same_bits(part, expected) if part.is_floating_point() else torch.equal(part, expected)
