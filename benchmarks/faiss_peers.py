"""FAISS's indexes of small codes, as peers: one index a KV head, over the keys as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.quality import Exam, FloatArray, IntArray, Picker, best_rows

PQ, FAST_SCAN, RABITQ = "IndexPQ", "IndexPQFastScan", "IndexRaBitQ"


@dataclass(frozen=True)
class FaissKind:
    """One kind of FAISS index; its own defaults otherwise (25 K-Means iterations, 256 rows a centroid).

    Attributes:
        name: of the class. m, bits: sub-quantizers and bits of each; of no meaning for IndexRaBitQ (1 bit).
    """

    name: str
    m: int = 0
    bits: int = 0

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"FAISS {self.name}" + (f" {self.m}x{self.bits}" if self.m else "")

    def make(self, head_dim: int) -> Any:
        """Return an empty index that ranks by inner product."""
        import faiss

        if self.name == RABITQ:
            # its estimates suppose a random rotation before, which the class leaves to its user
            turn = faiss.RandomRotationMatrix(head_dim, head_dim)
            return faiss.IndexPreTransform(turn, faiss.IndexRaBitQ(head_dim, faiss.METRIC_INNER_PRODUCT))
        kind = faiss.IndexPQFastScan if self.name == FAST_SCAN else faiss.IndexPQ
        return kind(head_dim, self.m, self.bits, faiss.METRIC_INNER_PRODUCT)

    def build(self, keys: FloatArray, n_train: int | None = None) -> list[Any]:
        """Return an index for each head of keys, float32 [n_kv_heads, n, head_dim], trained on the first n_train."""
        indexes = []
        for rows in keys:
            index = self.make(rows.shape[1])
            index.train(rows[:n_train])
            index.add(rows)
            indexes.append(index)
        return indexes


def code_bytes(index: Any) -> int:
    """Bytes that one key takes."""
    return int(index.sa_code_size())


def kinds_of_bytes(n_bytes: float, head_dim: int) -> list[FaissKind]:
    """Return the kinds that spend exactly n_bytes a key: 8-bit PQ, 4-bit FastScan, and RaBitQ where it fits."""
    whole = int(n_bytes)
    found = [FaissKind(PQ, whole, 8)] if whole == n_bytes and whole and head_dim % whole == 0 else []
    if found and head_dim % (2 * whole) == 0:
        found.append(FaissKind(FAST_SCAN, 2 * whole, 4))
    rabitq = FaissKind(RABITQ)
    if head_dim % 8 == 0 and code_bytes(rabitq.make(head_dim)) == n_bytes:
        found.append(rabitq)
    return found


def faiss_picker(exam: Exam, indexes: Sequence[Any]) -> Picker:
    """Return a picker that takes all scores of FAISS's indexes and lets the group agree as ours does.

    FAISS ranks for one query at a time and knows nothing of groups: the sum of softmaxes is taken outside it.
    The indexes hold the rows from `exam.sinks` on.
    """

    def pick(q: FloatArray, k: int, start: int, stop: int) -> IntArray:
        low, high = start - exam.sinks, stop - exam.sinks
        scores = np.stack([all_scores(index, ask) for index, ask in zip(indexes, q, strict=True)])
        return start + best_rows(exam.trace.scale * scores[:, :, low:high], k)

    return pick


def all_scores(index: Any, q: FloatArray) -> FloatArray:
    """Return the scores of all rows for q, float32 [n_queries, head_dim]: [n_queries, n]; rows never returned: -inf."""
    found, rows = index.search(np.ascontiguousarray(q), index.ntotal)
    scores = np.full((len(q), index.ntotal), -np.inf, np.float32)
    for line, at, values in zip(scores, rows, found, strict=True):
        line[at[at >= 0]] = values[at >= 0]
    return scores
