"""The pool of block frames on a device, and its replacement policies.

Names are imported on first use, so that importing the package loads nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.buffer_pool.admission import admission_limit as admission_limit
    from kvstore.buffer_pool.arc import ARC as ARC
    from kvstore.buffer_pool.clock import Clock as Clock
    from kvstore.buffer_pool.errors import BufferPoolError as BufferPoolError
    from kvstore.buffer_pool.errors import FrameMemoryError as FrameMemoryError
    from kvstore.buffer_pool.errors import FramePinnedError as FramePinnedError
    from kvstore.buffer_pool.errors import FrameStateError as FrameStateError
    from kvstore.buffer_pool.errors import GuardReleasedError as GuardReleasedError
    from kvstore.buffer_pool.errors import InvalidBatchError as InvalidBatchError
    from kvstore.buffer_pool.errors import PoolClosedError as PoolClosedError
    from kvstore.buffer_pool.guard import PinGuard as PinGuard
    from kvstore.buffer_pool.lfu import LFU as LFU
    from kvstore.buffer_pool.lru import LRU as LRU
    from kvstore.buffer_pool.policy import Policy as Policy
    from kvstore.buffer_pool.pool import BufferPool as BufferPool
    from kvstore.buffer_pool.registry import make_policy as make_policy
    from kvstore.buffer_pool.registry import policy_names as policy_names
    from kvstore.buffer_pool.registry import register_policy as register_policy
    from kvstore.buffer_pool.score_decay import ScoreDecay as ScoreDecay
    from kvstore.buffer_pool.stats import PoolCounters as PoolCounters
    from kvstore.buffer_pool.stats import PoolStats as PoolStats

_HOMES = {
    "ARC": "arc",
    "BufferPool": "pool",
    "BufferPoolError": "errors",
    "Clock": "clock",
    "FrameMemoryError": "errors",
    "FramePinnedError": "errors",
    "FrameStateError": "errors",
    "GuardReleasedError": "errors",
    "InvalidBatchError": "errors",
    "LFU": "lfu",
    "LRU": "lru",
    "PinGuard": "guard",
    "Policy": "policy",
    "PoolClosedError": "errors",
    "PoolCounters": "stats",
    "PoolStats": "stats",
    "ScoreDecay": "score_decay",
    "admission_limit": "admission",
    "make_policy": "registry",
    "policy_names": "registry",
    "register_policy": "registry",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
