"""Statistics as Prometheus reads them."""

import sys

import pytest

from kvstore import ConfigError, KVStore
from kvstore.metrics import StoreCollector, prometheus_text
from tests.builders import SCHEMA, fill, make_query
from tests.kvstore.test_durable import small

prometheus = pytest.importorskip("prometheus_client", reason="needs the extra metrics")


def samples(text):
    parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra metrics")
    families = list(parser.text_string_to_metric_families(text))
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}, families


def test_every_statistic_is_there_under_a_name_with_its_unit(tmp_path):
    with KVStore.open(tmp_path / "s", SCHEMA, small()) as store:
        seq = store.create("book")
        fill(seq, 300)
        for _ in range(3):
            seq.attend(0, make_query(SCHEMA, 1))
        store.flush()
        stats = store.stats()
        found, families = samples(prometheus_text(stats))
    assert found["kvstore_rows",] == 300
    assert found["kvstore_sequences",] == 1
    assert found["kvstore_steps_total",] == 1
    assert found["kvstore_attends_total", "index"] == 3
    assert found["kvstore_disk_bytes",] == stats.disk_bytes > 300 * 2 * SCHEMA.block_bytes / SCHEMA.block_tokens
    assert found["kvstore_heap_used_bytes",] == stats.heap_used_bytes
    assert all(family.documentation for family in families)


def test_a_registry_asks_the_store_at_each_scrape():
    store = KVStore(SCHEMA, small())
    registry = prometheus.CollectorRegistry()
    registry.register(StoreCollector(store))
    assert samples(prometheus.generate_latest(registry).decode())[0]["kvstore_rows",] == 0
    fill(store.create("book"), 40)
    assert samples(prometheus.generate_latest(registry).decode())[0]["kvstore_rows",] == 40


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ConfigError, match="pip install"):
        prometheus_text(KVStore(SCHEMA, small()).stats())
