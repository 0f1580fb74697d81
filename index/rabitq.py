"""RaBitQ: the signs of a key in a random basis, and an estimator of inner products without bias."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.index.base import FloatArray
from kvstore.index.coded import CodedIndex
from kvstore.index.rabitq_kernels import encode_signs, scan_signs
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import RowView
from kvstore.index.spread import usual_range
from kvstore.index.threads import run_parallel, run_sized
from kvstore.index.workspace import Workspace


class RaBitQIndex(CodedIndex):
    """One bit a dimension and one float32 a key (RaBitQ, arXiv 2405.12497).

    A key k is taken relative to a centre c and turned by a random rotation P: o = P (k - c). Of o the signs s are
    kept, and the inner product with a query is estimated as <q, c> + <P q, s> |o|^2 / <o, s>. This is the paper's
    <o_bar, q> / <o_bar, o> with the norms put back (its section 3.2): over rotations its expectation is the inner
    product, and its error is about 0.76 |o| |q| / sqrt(head_dim). The paper keeps a second number a key, for
    distances and their error bounds; for inner products the one factor is enough. Queries are not rounded.

    The centre is the mean of the training keys, numbers gone astray clamped (see `usual_range`): one huge key would
    move the mean away from all others. Nothing else is learned.

    Args:
        seed: of the rotation, the same for all KV heads; indexes with the same seed and head_dim share it.
        rope: what a store gives to every kind; not used.

    `ceil(head_dim / 8) + 4` bytes a key. Adding O(n * head_dim^2), scan O(n * group * head_dim / 8) a KV head.
    """

    kind: ClassVar[str] = "rabitq"

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        first_row: int = 0,
        rope: RopeSpec | None = None,
        seed: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        self._n_bytes = -(-head_dim // 8)
        parts: list[tuple[int, npt.DTypeLike]] = [(self._n_bytes, np.uint8), (1, np.float32)]
        super().__init__(n_kv_heads, head_dim, parts=parts, first_row=first_row, workspace=workspace)
        self.seed = seed
        self._centre: FloatArray | None = None

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """Signs of the rows covered, uint8 [n_kv_heads, n_rows, n_bytes]; a read-only view, see `encode_signs`."""
        view = self._parts[0][:, : self.n_rows]
        view.flags.writeable = False
        return view

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index."""
        return {**super().describe(), "bits": 1, "seed": self.seed, "trained": self.trained}

    def _learned(self) -> tuple[npt.NDArray[Any], ...]:
        return (self._centre,) if self._centre is not None else ()

    def _learn(self, keys: FloatArray) -> None:
        low, high = usual_range(keys)
        self._centre = np.clip(keys, low[:, None], high[:, None]).mean(axis=1, dtype=np.float64).astype(np.float32)

    def _encode(self, keys: FloatArray, start: int) -> None:
        rotation = random_rotation(self.head_dim, self.seed)
        work_ns = 0.1 * self.head_dim * keys.size
        run_sized(work_ns, encode_signs, keys, rotation, self._centre, start, *self._parts)

    def _score_ns(self, group: int) -> float:
        return 0.6 * self._n_bytes * group

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        turned = np.zeros((*q.shape[:2], 8 * self._n_bytes), np.float32)
        np.matmul(q, random_rotation(self.head_dim, self.seed), out=turned[:, :, : self.head_dim])
        (centre,) = self._learned()
        offsets = np.sum(q * centre[:, None], axis=2)
        first = self.first_row
        run_parallel(scan_signs, *self._parts, turned, offsets, start - first, stop - first, out)

    def _check(self) -> None:
        super()._check()
        factors = self._parts[1][:, : self.n_rows]
        assert (np.isfinite(factors) & (factors >= 0)).all()
        if self.head_dim % 8:
            assert (self.codes[:, :, -1] >> (self.head_dim % 8) == 0).all(), "bits behind the last dimension are set"


@functools.lru_cache(maxsize=16)
def random_rotation(head_dim: int, seed: int) -> FloatArray:
    """Return an orthogonal float32 [head_dim, head_dim], uniform over all of them, read-only. O(head_dim^3).

    The Q of a normal matrix, its columns' signs those of R's diagonal (Mezzadri 2007, arXiv math-ph/0609050).
    """
    normal = np.random.default_rng([seed, head_dim]).standard_normal((head_dim, head_dim))
    orthogonal, triangular = np.linalg.qr(normal)
    rotation: FloatArray = (orthogonal * np.sign(np.diagonal(triangular))).astype(np.float32)
    rotation.flags.writeable = False
    return rotation
