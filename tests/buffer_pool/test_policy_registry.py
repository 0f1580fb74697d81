from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvstore.buffer_pool import BufferPool, registry
from kvstore.buffer_pool.lfu import LFU
from kvstore.buffer_pool.lru import LRU
from kvstore.buffer_pool.registry import make_policy, policy_names, register_policy
from kvstore.errors import ConfigError


@pytest.fixture(autouse=True)
def own_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


def test_built_in_policies() -> None:
    assert policy_names() == ["arc", "clock", "lfu", "lru", "score-decay"]
    for name in policy_names():
        assert make_policy(name, 5).n_frames == 5
    assert isinstance(make_policy("lfu", 4, half_life=2.0), LFU)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'mru'.*arc, clock, lfu, lru, score-decay"):
        make_policy("mru", 4)
    with pytest.raises(ConfigError, match="'mru'"):
        BufferPool(4, 64, policy="mru")


@pytest.mark.parametrize("settings", [{"half_life": 2}, {"sise": 3}])
def test_a_setting_that_the_policy_does_not_have(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'lru' cannot be made with the settings"):
        make_policy("lru", 4, **settings)


def test_registering() -> None:
    register_policy("mine", LRU)
    register_policy("mine", LRU)
    assert isinstance(BufferPool(4, 64, policy="mine").policy, LRU)
    with pytest.raises(ConfigError, match="exists already"):
        register_policy("lfu", LRU)


def test_entry_points_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("elsewhere", "kvstore.buffer_pool.lru:LRU", registry.ENTRY_POINTS)

    def announced(*, group: str) -> list[Any]:
        assert group == "kvstore.policies"
        return [point]

    monkeypatch.setattr(registry, "entry_points", announced)
    assert "elsewhere" in policy_names()
    assert isinstance(make_policy("elsewhere", 3), LRU)


def test_a_policy_made_by_the_caller() -> None:
    policy = LFU(4, half_life=1.0)
    assert BufferPool(4, 64, policy=policy).policy is policy
    with pytest.raises(ConfigError, match="made for 4 frames, the pool has 5"):
        BufferPool(5, 64, policy=policy)
    with pytest.raises(ConfigError, match="go with a policy's name"):
        BufferPool(4, 64, policy=LFU(4), policy_options={"half_life": 1.0})
