from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.index import registry
from kvstore.index.flat import FlatIndex
from kvstore.index.pq import PQIndex
from kvstore.index.registry import index_kinds, make_index, register_index


@pytest.fixture(autouse=True)
def own_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


def test_built_in_kinds() -> None:
    assert isinstance(make_index("flat", 2, 16, first_row=3), FlatIndex)
    index = make_index("pq", 2, 16, m=4, bits=4)
    assert isinstance(index, PQIndex)
    assert index.layout.m == 4
    assert {"flat", "pq"} <= set(index_kinds())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'ivf'.*flat.*pq"):
        make_index("ivf", 2, 16)


def test_registering() -> None:
    register_index("mine", FlatIndex)
    register_index("mine", FlatIndex)
    assert isinstance(make_index("mine", 1, 8), FlatIndex)
    with pytest.raises(ConfigError, match="exists already"):
        register_index("pq", FlatIndex)


def test_entry_points_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("elsewhere", "kvstore.index.flat:FlatIndex", registry.ENTRY_POINTS)

    def announced(*, group: str) -> list[Any]:
        assert group == "kvstore.indexes"
        return [point]

    monkeypatch.setattr(registry, "entry_points", announced)
    assert "elsewhere" in index_kinds()
    assert isinstance(make_index("elsewhere", 1, 8), FlatIndex)
