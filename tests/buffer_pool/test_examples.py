import doctest
import importlib
from pathlib import Path

import pytest

import kvstore.buffer_pool

MODULES = sorted(path.stem for path in Path(kvstore.buffer_pool.__file__).parent.glob("[!_]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"kvstore.buffer_pool.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_names_that_the_package_exports_exist():
    for name in kvstore.buffer_pool.__all__:
        assert getattr(kvstore.buffer_pool, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Pool'"):
        _ = kvstore.buffer_pool.Pool
