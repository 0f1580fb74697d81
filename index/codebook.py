"""The centroids that codes stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import NonFiniteError, SchemaMismatchError
from kvstore.index.layout import Layout
from kvstore.index.nearest import columns

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Codebook:
    """Centroids of all KV heads and sub-spaces of one layer; never changed, so it may be shared.

    Attributes:
        centroids: float32 [n_kv_heads, m, k, sub_dim], C-order, arranged as `Layout` says; k <= 2**bits.
        laid, offsets: the same in the form that `nearest` wants, [n_kv_heads, m, sub_dim, >= k] and [.., >= k].
    """

    centroids: FloatArray
    laid: FloatArray
    offsets: FloatArray

    @classmethod
    def of(cls, centroids: FloatArray) -> Codebook:
        """Return the codebook of these centroids, float32 [n_kv_heads, m, k, sub_dim]; they are copied."""
        own = np.array(centroids, np.float32, order="C")
        if own.ndim != 4 or 0 in own.shape:
            raise SchemaMismatchError(
                f"centroids must be [n_kv_heads, m, k, sub_dim], none of them 0, not {list(own.shape)}"
            )
        if not np.isfinite(own).all():
            raise NonFiniteError("centroids hold NaN or infinity; train the codebook again")
        laid, offsets = columns(own)
        return cls(own, laid, offsets)

    def checked(self, n_kv_heads: int, layout: Layout) -> Codebook:
        """Return self, or raise `SchemaMismatchError` when it is not one for these heads and this layout."""
        heads, m, k, sub_dim = self.centroids.shape
        if (heads, m, sub_dim) != (n_kv_heads, layout.m, layout.sub_dim) or k > layout.n_centroids:
            raise SchemaMismatchError(
                f"the codebook is [{heads}, {m}, {k}, {sub_dim}], the index needs "
                f"[{n_kv_heads}, {layout.m}, <= {layout.n_centroids}, {layout.sub_dim}]"
            )
        return self

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.centroids.nbytes + self.laid.nbytes + self.offsets.nbytes)
