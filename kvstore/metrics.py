"""A store's statistics in the format of Prometheus; needs the package prometheus-client (extra `metrics`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.stats import StoreStats
    from kvstore.store import KVStore

GAUGES = {
    "sequences": "Sequences in the store.",
    "rows": "Rows in memory; a row counts once for all layers.",
    "blocks": "Blocks handed out.",
    "heap_used_bytes": "Bytes of blocks handed out.",
    "heap_reserved_bytes": "Bytes of memory taken from the system.",
    "index_bytes": "Bytes of codes and codebooks.",
    "codebook_bytes": "Bytes of the model's codebooks.",
    "scratch_bytes": "Bytes of buffers of the calling thread.",
    "memory_bytes": "Bytes of memory in all: rows, index, pool, scratch.",
    "indexed_rows": "Rows that indexes cover, added up over tables.",
    "drift": "Largest drift of all tables; 1: like training.",
    "disk_bytes": "Bytes of records on disk.",
    "queued_bytes": "Bytes that wait to be written.",
    "disk_blocks": "Blocks of sequences in memory that lie on the disk only.",
    "pool_bytes": "Bytes of frames for such blocks.",
    "pool_blocks": "Blocks in frames.",
    "pool_pins": "Frames pinned.",
}
OF_STORE = {
    "unloads": "Sequences taken out of memory.",
    "index_builds": "Trainings of an index.",
    "spills": "Blocks that moved to the disk.",
    "read_extents": "Extents read from the disk by queries.",
    "read_bytes": "Bytes read from the disk by queries.",
    "damaged_records": "Records refused as damaged.",
    "pool_lookups": "Blocks looked for in frames.",
    "pool_hits": "Blocks found in frames.",
    "pool_evictions": "Blocks that left their frame for another.",
    "pool_stalls": "Times that frames were too few.",
}
COUNTERS = {
    "topks": "Top-k queries answered.",
    "rows_attended": "Rows that attention queries read.",
    "rows_available": "Rows that those queries could have read.",
    "steps": "Steps committed.",
    "aborted_steps": "Steps rolled back.",
}


class StoreCollector:
    """Give it to a `CollectorRegistry`; it asks the store at each scrape, on the thread that scrapes.

    A store is used by one thread: where another one scrapes, call `stats()` on the store's and serve that.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, named kvstore_*; counters end in _total."""
        return families(self._store.stats())


def families(stats: StoreStats) -> Iterator[Any]:
    """Yield statistics as metric families of prometheus-client; raises `ConfigError` when that is not installed."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ModuleNotFoundError:
        raise ConfigError("prometheus-client is not installed; run: pip install 'kvstore-engine[metrics]'") from None
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(f"kvstore_{name}", text, value=getattr(stats, name))
    for name, text in OF_STORE.items():
        yield CounterMetricFamily(f"kvstore_{name}", text, value=getattr(stats, name))
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(f"kvstore_{name}", text, value=getattr(stats.counters, name))
    attends = CounterMetricFamily("kvstore_attends", "Attention queries answered, by plan.", labels=["plan"])
    for plan, count in stats.counters.attends.items():
        attends.add_metric([plan], count)
    yield attends


def prometheus_text(stats: StoreStats) -> str:
    """Return statistics in the text format that Prometheus scrapes."""
    collected = list(families(stats))

    from prometheus_client import CollectorRegistry, generate_latest

    class _Fixed:
        def collect(self) -> list[Any]:
            return collected

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed())
    return generate_latest(registry).decode()
