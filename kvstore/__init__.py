"""A storage engine for the KV cache of transformer models.

Names are loaded when they are first used, so that `import kvstore` (and `kvstore --help`) costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.config import IndexConfig, StoreConfig
    from kvstore.errors import (
        BlockNotFoundError,
        ConfigError,
        CorruptBlockError,
        CorruptStoreError,
        ForkedStoreError,
        HeapFullError,
        IndexNotTrainedError,
        InvalidQueryError,
        KVStoreError,
        LayerNotFoundError,
        MaintenanceError,
        NonFiniteError,
        ReadOnlyStoreError,
        SchemaMismatchError,
        SequenceExistsError,
        SequenceNotFoundError,
        SpillFullError,
        StepError,
        StorageError,
        StoreClosedError,
        StoreLockedError,
        UnsupportedFormatError,
        UnsupportedModelError,
    )
    from kvstore.explain import Explanation
    from kvstore.index.rope import RopeSpec
    from kvstore.schema import Schema
    from kvstore.sequence import Sequence
    from kvstore.stats import StoreStats
    from kvstore.store import KVStore
    from kvstore.topk import TopK
    from kvstore.warming import warmup

__version__ = "0.1.0"

__all__ = [
    "BlockNotFoundError",
    "ConfigError",
    "CorruptBlockError",
    "CorruptStoreError",
    "Explanation",
    "ForkedStoreError",
    "HeapFullError",
    "IndexConfig",
    "IndexNotTrainedError",
    "InvalidQueryError",
    "KVStore",
    "KVStoreError",
    "LayerNotFoundError",
    "MaintenanceError",
    "NonFiniteError",
    "ReadOnlyStoreError",
    "RopeSpec",
    "Schema",
    "SchemaMismatchError",
    "Sequence",
    "SequenceExistsError",
    "SequenceNotFoundError",
    "SpillFullError",
    "StepError",
    "StorageError",
    "StoreClosedError",
    "StoreConfig",
    "StoreLockedError",
    "StoreStats",
    "TopK",
    "UnsupportedFormatError",
    "UnsupportedModelError",
    "warmup",
]

_HOMES = {
    "Explanation": "kvstore.explain",
    "IndexConfig": "kvstore.config",
    "KVStore": "kvstore.store",
    "RopeSpec": "kvstore.index.rope",
    "Schema": "kvstore.schema",
    "Sequence": "kvstore.sequence",
    "StoreConfig": "kvstore.config",
    "StoreStats": "kvstore.stats",
    "TopK": "kvstore.topk",
    "warmup": "kvstore.warming",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "kvstore.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
