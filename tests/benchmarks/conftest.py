import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:  # `benchmarks` is no installed package
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def model():
    from tests.benchmarks.tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def ids():
    import torch

    return torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def config():
    from kvstore import IndexConfig, StoreConfig

    return StoreConfig(sinks=2, window=16, dense_rows=32, min_selected=8, index=IndexConfig(min_rows=64))
