import dataclasses

from kvstore import KVStore, RopeSpec, StoreConfig
from tests.builders import SCHEMA, flat_config, pq_config
from tests.contracts.store import StoreContract

ROPE = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(10000.0, 16), None))


class TestFlatStore(StoreContract):
    def make_store(self):
        return KVStore(SCHEMA, flat_config())


class TestIndexedStore(StoreContract):
    def make_store(self):
        return KVStore(SCHEMA, pq_config())


class TestIndexedStoreOfHalfPrecisionKeysWithRope(StoreContract):
    def make_store(self):
        return KVStore(dataclasses.replace(ROPE, dtype="bfloat16"), pq_config())


class TestStoreWithoutSettings(StoreContract):
    def make_store(self):
        return KVStore(SCHEMA, StoreConfig())
