"""Coding keys in the metric of the queries that will meet them.

K-Means makes |k - c|^2 small, but what counts is the error of the scores, E[(q . (k - c))^2] = (k - c)' H (k - c) with
H = E[q q']. Keys stored as H^(1/2) k, and queries asked as H^(-1/2) q, have the same scores, and there the two errors
are the same (A2ATS, arXiv 2502.12665, uses such a metric for vector quantization of keys).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import NonFiniteError, SchemaMismatchError
from kvstore.index.base import FloatArray, IntArray

QUERIES = "queries"
_FLOOR = 1e-3
"""Share of the mean weight that every direction keeps: queries to come may use what those seen did not."""


def query_moments(q: FloatArray) -> npt.NDArray[np.float64]:
    """Return E[q q'] of queries float32 [n_kv_heads, n >= 1, head_dim]: float64 [n_kv_heads, head_dim, head_dim]."""
    wide = np.asarray(q, np.float64)
    moments: npt.NDArray[np.float64] = np.swapaxes(wide, 1, 2) @ wide / wide.shape[1]
    return moments


class QueryMoments:
    """The mean of q q' over all queries added so far; O(n * head_dim^2) a KV head to add n."""

    def __init__(self) -> None:
        self._sum: npt.NDArray[np.float64] | None = None
        self._count = 0

    @property
    def mean(self) -> npt.NDArray[np.float64] | None:
        """float64 [n_kv_heads, head_dim, head_dim]; None before any query."""
        return None if self._sum is None else self._sum / self._count

    @property
    def count(self) -> int:
        """Queries added so far."""
        return self._count

    def add(self, q: FloatArray) -> None:
        """Add queries, float32 [n_kv_heads, n, head_dim]."""
        n = q.shape[1]
        if n:
            total = n * query_moments(q)
            self._sum = total if self._sum is None else self._sum + total
            self._count += n

    def clone(self) -> QueryMoments:
        """Return an independent copy."""
        twin = QueryMoments()
        twin._sum, twin._count = self._sum, self._count  # sums are replaced, never changed
        return twin


class Weighting:
    """A symmetric map of keys for each KV head, and its inverse for queries; never changed, so it may be shared.

    Attributes:
        forth, back: float32 [n_kv_heads, head_dim, head_dim], or [n_kv_heads, head_dim] where the maps are diagonal.
    """

    def __init__(self, forth: FloatArray, back: FloatArray) -> None:
        self.forth, self.back = np.asarray(forth, np.float32), np.asarray(back, np.float32)
        if self.forth.shape != self.back.shape or self.forth.ndim not in (2, 3):
            raise SchemaMismatchError(f"the maps are {list(self.forth.shape)} and {list(self.back.shape)}")
        if not (np.isfinite(self.forth).all() and np.isfinite(self.back).all()):
            raise NonFiniteError("the maps of a weighting hold NaN or infinity; train the codebook again")

    @classmethod
    def full(cls, moments: npt.ArrayLike) -> Weighting:
        """Return H^(1/2) and its inverse for moments [n_kv_heads, head_dim, head_dim]; for keys coded as stored."""
        values, vectors = np.linalg.eigh(_checked(moments))
        roots = np.sqrt(_floored(values))
        forth = (vectors * roots[:, None]) @ np.swapaxes(vectors, 1, 2)
        back = (vectors / roots[:, None]) @ np.swapaxes(vectors, 1, 2)
        return cls(forth, back)

    @classmethod
    def of_pairs(cls, moments: npt.ArrayLike, first: IntArray, second: IntArray) -> Weighting:
        """Return one weight a pair of dimensions (first[i], second[i]): RoPE, which turns pairs, leaves it alone."""
        energy = np.diagonal(_checked(moments), axis1=1, axis2=2).copy()
        energy[:, first] = energy[:, second] = (energy[:, first] + energy[:, second]) / 2
        roots = np.sqrt(_floored(energy))
        return cls(roots, 1 / roots)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.forth.nbytes + self.back.nbytes)

    def keys(self, keys: FloatArray) -> FloatArray:
        """Map keys float32 [n_kv_heads, n, head_dim] into the metric."""
        return _mapped(keys, self.forth)

    def queries(self, q: FloatArray) -> FloatArray:
        """Map queries float32 [n_kv_heads, group, head_dim], so that scores stay what they were."""
        return _mapped(q, self.back)

    def stored(self, keys: FloatArray, head: int) -> FloatArray:
        """Map keys of one KV head, float32 [n, head_dim], back to what is stored."""
        return np.asarray(_mapped(keys[None], self.back[head][None])[0])

    def checked(self, n_kv_heads: int, head_dim: int) -> Weighting:
        """Return self, or raise `SchemaMismatchError` when it is not one for these heads."""
        if self.forth.shape[:2] != (n_kv_heads, head_dim) or self.forth.shape[-1] != head_dim:
            raise SchemaMismatchError(
                f"the weighting is {list(self.forth.shape)}, the index has {n_kv_heads} KV heads of {head_dim}"
            )
        return self


def _mapped(x: FloatArray, maps: FloatArray) -> FloatArray:
    out = x * maps[:, None] if maps.ndim == 2 else x @ maps
    return np.ascontiguousarray(out, np.float32)


def _checked(moments: npt.ArrayLike) -> npt.NDArray[Any]:
    found = np.asarray(moments, np.float64)
    if found.ndim != 3 or found.shape[1] != found.shape[2]:
        raise SchemaMismatchError(f"moments must be [n_kv_heads, head_dim, head_dim], not {list(found.shape)}")
    if not np.isfinite(found).all():
        raise NonFiniteError("the moments of the queries hold NaN or infinity")
    return found


def _floored(weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Weights [n_kv_heads, head_dim] of mean 1, none below the floor; all 1 for a head without queries."""
    mean = weights.mean(axis=1, keepdims=True)
    scaled = np.divide(weights, mean, out=np.ones_like(weights), where=mean > 0)
    return np.asarray(np.maximum(scaled, _FLOOR))
