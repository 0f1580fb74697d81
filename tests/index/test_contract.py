from typing import Any

from kvstore.index.base import Index
from kvstore.index.flat import FlatIndex
from kvstore.index.pq import PQIndex
from kvstore.index.rope import RopeSpec
from tests.contracts.index import DIM, HEADS, IndexContract


class TestFlat(IndexContract):
    def make(self, **settings: Any) -> Index:
        return FlatIndex(HEADS, DIM, **settings)


class TestRawCodes(IndexContract):
    def make(self, **settings: Any) -> Index:
        return PQIndex(HEADS, DIM, m=2, bits=6, **settings)


class TestRopeCodes(IndexContract):
    def make(self, **settings: Any) -> Index:
        return PQIndex(HEADS, DIM, m=1, bits=8, rope=RopeSpec.from_theta(1e4, DIM), **settings)
