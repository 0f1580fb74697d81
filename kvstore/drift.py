"""Whether the codes of new rows are still as good as those that the codebook was made for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

SAMPLE_ROWS = 64
"""Rows of an append that are looked at, at most."""

MEMORY_ROWS = 256
"""Sampled rows after which an older one weighs 1 / e."""

TRUSTED_ROWS = 32
"""Sampled rows from which the estimate says anything."""


class Drift:
    """Running mean of the squared error of the rows appended lately, relative to that of rows like the training's.

    Error that grows moves scores, so rows are ranked worse: it stands for recall, which could only be measured with the
    exact scores of all rows. O(sampled rows) an append; no row is read again.
    """

    __slots__ = ("_error", "_reference", "n_sampled")

    def __init__(self, reference: FloatArray) -> None:
        """Start from the mean squared error to expect of keys like those trained on, float32 [n_kv_heads]."""
        self._reference = np.maximum(reference.astype(np.float64), np.finfo(np.float32).tiny)
        self._error = np.zeros_like(self._reference)
        self.n_sampled = 0

    @property
    def reference(self) -> FloatArray:
        """Mean squared error of rows like those trained on, float32 [n_kv_heads]."""
        return self._reference.astype(np.float32)

    def observe(self, errors: FloatArray) -> None:
        """Take in the squared errors of sampled rows that were just coded, float32 [n_kv_heads, n]."""
        n = errors.shape[1]
        if n == 0:
            return
        # Until the memory is full all rows weigh the same; then old ones fade.
        weight = max(n / (self.n_sampled + n), 1 - float(np.exp(-n / MEMORY_ROWS)))
        self._error += weight * (errors.mean(axis=1) - self._error)
        self.n_sampled += n

    @property
    def ratio(self) -> float | None:
        """Error of recent rows relative to training, mean over KV heads: 1.0 is like training; None: too few rows."""
        if self.n_sampled < TRUSTED_ROWS:
            return None
        return float(np.mean(self._error / self._reference))

    def clone(self) -> Drift:
        """Return an independent copy."""
        twin = Drift(self._reference)
        twin._error, twin.n_sampled = self._error.copy(), self.n_sampled
        return twin


def sample_rows(start: int, stop: int, limit: int = SAMPLE_ROWS) -> IntArray:
    """Return at most `limit` row ids spread over [start, stop), int64, the same ones each time."""
    n = min(limit, stop - start)
    return start + (np.arange(n, dtype=np.int64) * (stop - start)) // max(n, 1)
