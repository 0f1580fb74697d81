"""Scalar quantization: every channel of a key rounded to a few bits on its own."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.index.base import FloatArray
from kvstore.index.coded import CodedIndex
from kvstore.index.rope import RopeSpec
from kvstore.index.rows import RowView
from kvstore.index.scalar_kernels import encode_scalars, scalar_scan
from kvstore.index.spread import usual_range
from kvstore.index.threads import run_parallel, run_sized
from kvstore.index.workspace import Workspace


class ScalarIndex(CodedIndex):
    """Codes of 4 or 8 bits a channel, on a uniform grid over the range that training has seen.

    A step of a code is folded into the query, so a score is one product of code and query. Numbers outside the range,
    of training keys gone astray (see `usual_range`) or of keys that came later, are clamped to it. A channel that
    is constant while training stays that constant. Large codes, but the most faithful ones: at 4 bits they choose
    nearly the rows of the exact keys (KIVI, arXiv 2402.02750, finds per-channel ranges right for keys).

    Args:
        bits: 4 (kind `"sq4"`) or 8 (`"sq8"`); `head_dim * bits / 8` bytes a key, rounded up.
        rope, seed: what a store gives to every kind; neither matters here.

    Raises `ConfigError` for other bits. Training O(n * head_dim), scan O(n * group * head_dim) a KV head.

    >>> import numpy as np
    >>> index = ScalarIndex(1, 4, bits=8)
    >>> index.train(np.eye(4, dtype=np.float32)[None])      # [n_kv_heads=1, n=4, head_dim=4]
    >>> index.add(np.eye(4, dtype=np.float32)[None])
    >>> index.search(np.array([[[0, 0, 2, 1]]], np.float32), 1, scale=0.5).rows.tolist()
    [[2]]
    """

    kind: ClassVar[str] = "sq8"

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        *,
        bits: int = 8,
        first_row: int = 0,
        rope: RopeSpec | None = None,
        seed: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        if bits not in (4, 8):
            raise ConfigError(f"bits must be 4 or 8, not {bits}")
        self.bits = bits
        self.kind = f"sq{bits}"  # type: ignore[misc]  # one class, two names in the registry
        self._n_bytes = -(-head_dim * bits // 8)
        super().__init__(
            n_kv_heads, head_dim, parts=[(self._n_bytes, np.uint8)], first_row=first_row, workspace=workspace
        )
        self._low: FloatArray | None = None
        self._step: FloatArray | None = None

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """Codes of the rows covered, uint8 [n_kv_heads, n_rows, n_bytes]; a read-only view, see `encode_scalars`."""
        view = self._parts[0][:, : self.n_rows]
        view.flags.writeable = False
        return view

    def decode(self) -> FloatArray:
        """Return the keys that the codes stand for, float32 [n_kv_heads, n_rows, head_dim]. O(n * head_dim)."""
        low, step = self._grid()
        codes = self.codes
        if self.bits == 4:
            codes = np.concatenate([codes & 15, codes >> 4], axis=2)[:, :, : self.head_dim]
        return low[:, None] + step[:, None] * codes

    def describe(self) -> dict[str, Any]:
        """Return what `explain` prints of this index."""
        return {**super().describe(), "bits": self.bits, "trained": self.trained}

    def _learned(self) -> tuple[npt.NDArray[Any], ...]:
        return (self._low, self._step) if self._low is not None and self._step is not None else ()

    def _grid(self) -> tuple[FloatArray, FloatArray]:
        low, step = self._learned() or (np.zeros((self.n_kv_heads, self.head_dim), np.float32),) * 2
        return low, step

    def _learn(self, keys: FloatArray) -> None:
        low, high = usual_range(keys)
        self._low = low
        self._step = ((high.astype(np.float64) - low) / (2**self.bits - 1)).astype(np.float32)

    def _encode(self, keys: FloatArray, start: int) -> None:
        low, step = self._grid()
        inverse = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
        inverse[np.isinf(inverse)] = 0.0  # a step too small to divide by
        run_sized(0.5 * keys.size, encode_scalars, keys, low, inverse, self.bits, start, self._parts[0])

    def _score_ns(self, group: int) -> float:
        return 0.1 * self.head_dim * (group + 1)

    def _scan(self, q: FloatArray, view: RowView | None, start: int, stop: int, out: FloatArray) -> None:
        low, step = self._grid()
        weights = np.zeros((*q.shape[:2], self._n_bytes * 8 // self.bits), np.float32)
        np.multiply(q, step[:, None], out=weights[:, :, : self.head_dim])
        offsets = np.sum(q * low[:, None], axis=2)
        first = self.first_row
        kernel = scalar_scan(self.bits)
        run_parallel(kernel, self._parts[0], weights, offsets, start - first, stop - first, out)

    def _check(self) -> None:
        super()._check()
        assert all((step >= 0).all() for step in self._learned()[1:])
        if self.bits == 4 and self.head_dim % 2:
            assert (self.codes[:, :, -1] >> 4 == 0).all(), "the half byte that belongs to no channel is not empty"
