"""The centroids that codes stand for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.errors import NonFiniteError, SchemaMismatchError
from kvstore.index.layout import Layout
from kvstore.index.nearest import columns
from kvstore.index.short_codes import ShortCentroids, short_centroids
from kvstore.index.weighting import Weighting

FloatArray = npt.NDArray[np.float32]


class Codebook:
    """Centroids of all KV heads and sub-spaces of one layer; never changed, so it may be shared.

    Made from centroids, float32 [n_kv_heads, m, k, sub_dim], arranged as `Layout` says, k <= 2**bits; they are
    copied. `weighting` is the metric that they are in, None for that of the keys as stored. Raises
    `SchemaMismatchError` for a wrong shape, `NonFiniteError` for NaN or infinity.

    Attributes:
        k: centroids a sub-space.
        laid, offsets: the centroids as `nearest` wants them, float32 [n_kv_heads, m, sub_dim, >= k] and [.., >= k].
    """

    def __init__(self, centroids: FloatArray, weighting: Weighting | None = None) -> None:
        given = np.asarray(centroids, np.float32)
        if given.ndim != 4 or 0 in given.shape:
            raise SchemaMismatchError(
                f"centroids must be [n_kv_heads, m, k, sub_dim], none of them 0, not {list(given.shape)}"
            )
        if not np.isfinite(given).all():
            raise NonFiniteError("centroids hold NaN or infinity; train the codebook again")
        self.k = given.shape[2]
        self.laid, self.offsets = columns(given)
        self.weighting = weighting

    @property
    def centroids(self) -> FloatArray:
        """A copy of the centroids, float32 [n_kv_heads, m, k, sub_dim], C-order."""
        return np.swapaxes(self.laid[..., : self.k], -1, -2).copy()

    @cached_property
    def short(self) -> ShortCentroids:
        """The centroids as scans before RoPE read them; made when first asked for."""
        return short_centroids(np.swapaxes(self.laid[..., : self.k], -1, -2))

    @cached_property
    def pair_lengths(self) -> FloatArray:
        """Root mean square of the length of the centroids' pairs, float32 [n_kv_heads, m, sub_dim / 2]; made once."""
        squares = np.square(self.laid[..., : self.k]).mean(axis=-1)
        first, second = np.split(squares, 2, axis=-1)
        return np.asarray(np.sqrt(first + second), np.float32)

    def checked(self, n_kv_heads: int, layout: Layout) -> Codebook:
        """Return self, or raise `SchemaMismatchError` when it is not one for these heads and this layout."""
        heads, m, sub_dim, _ = self.laid.shape
        if (heads, m, sub_dim) != (n_kv_heads, layout.m, layout.sub_dim) or self.k > layout.n_centroids:
            raise SchemaMismatchError(
                f"the codebook is [{heads}, {m}, {self.k}, {sub_dim}], the index needs "
                f"[{n_kv_heads}, {layout.m}, <= {layout.n_centroids}, {layout.sub_dim}]"
            )
        if self.weighting is not None:
            self.weighting.checked(n_kv_heads, layout.head_dim)
        return self

    def parts(self, head: int, j: int, codes: npt.NDArray[np.int64]) -> FloatArray:
        """Return the centroids that codes int64 [n] of a sub-space stand for, float32 [n, sub_dim]."""
        return np.ascontiguousarray(self.laid[head, j][:, codes].T)

    @property
    def nbytes(self) -> int:
        """Bytes held, those of `short` included once it was asked for."""
        made = self.__dict__.get("short")
        weights = self.weighting.nbytes if self.weighting is not None else 0
        return int(self.laid.nbytes + self.offsets.nbytes + (made.nbytes if made is not None else 0)) + weights
