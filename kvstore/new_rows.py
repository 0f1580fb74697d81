"""New rows of one layer, of one sequence or of several, on their way into tables."""

from __future__ import annotations

import torch

from kvstore.index.rows import DTYPE_CODES
from kvstore.kernels.few_rows import copy_few_rows, finite_kernel
from kvstore.schema import Schema
from kvstore.validate import check_new_rows, check_row_numbers

FEW_ROWS = 32
"""Rows of a step up to which they are copied by address. A call of torch costs tens of microseconds between two layers
of a model, and there are four a layer; torch's copy of many rows is faster, it uses several threads."""


class NewRows:
    """Keys [n_kv_heads, n, head_dim] and values [n_kv_heads, n, value_dim], or [n_sequences, ...] of both.

    Making one checks them: raises `SchemaMismatchError` or `NonFiniteError`.

    Attributes:
        n: rows of each sequence.
    """

    __slots__ = ("_batched", "_few", "_keys", "_schema", "_values", "n")

    def __init__(
        self, schema: Schema, keys: torch.Tensor, values: torch.Tensor, n_sequences: int | None = None
    ) -> None:
        """`n_sequences`: of a batch; None for one sequence, whose tensors have a dimension less."""
        check_new_rows(schema, keys, values, n_sequences)
        self._schema, self._batched = schema, n_sequences is not None
        self._keys, self._values = keys, values
        self.n = keys.shape[-2]
        self._few = 0 < self.n <= FEW_ROWS and keys.stride(-1) == 1 and values.stride(-1) == 1
        if not (self._few and self._all_finite()):
            check_row_numbers(keys)  # says where, or looks at many rows with several threads

    @property
    def few(self) -> bool:
        """Whether `copy_few` takes them; `tensors` are for all."""
        return self._few

    def tensors(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of one sequence."""
        keys, values = self._keys.detach(), self._values.detach()
        return (keys[place], values[place]) if self._batched else (keys, values)

    def copy_few(self, place: int, start: int, n: int, at: int, key_home: int, value_home: int) -> None:
        """Copy the rows [start, start + n) of one sequence to row `at` of a block whose keys and values begin there."""
        s = self._schema
        for x, home, row_bytes in ((self._keys, key_home, s.key_bytes), (self._values, value_home, s.value_bytes)):
            item, strides = x.element_size(), x.stride()
            source = x.data_ptr() + item * (start * strides[-2] + (place * strides[0] if self._batched else 0))
            between = (item * strides[-3], item * strides[-2])
            shape = (s.n_kv_heads, n, row_bytes)
            copy_few_rows(source, between, home + at * row_bytes, (s.block_tokens * row_bytes, row_bytes), shape)

    def _all_finite(self) -> bool:
        x, item = self._keys, self._keys.element_size()
        strides = [item * stride for stride in x.stride()]
        batch = (strides[0], x.shape[0]) if self._batched else (0, 1)
        kernel = finite_kernel(DTYPE_CODES[self._schema.dtype])
        return bool(kernel(x.data_ptr(), (batch[0], strides[-3], strides[-2]), (batch[1], *x.shape[-3:])))
