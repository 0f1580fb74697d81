"""The query of a decode step, on its way from torch to the kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import NonFiniteError
from kvstore.index.rows import DTYPE_CODES
from kvstore.index.workspace import Workspace
from kvstore.kernels.query import query_kernel
from kvstore.schema import DTYPES, Schema

FloatArray = npt.NDArray[np.float32]
_CODES = {dtype: DTYPE_CODES[name] for name, dtype in DTYPES.items()}


def read_query(q: torch.Tensor, schema: Schema, scale: float, workspace: Workspace) -> tuple[FloatArray, FloatArray]:
    """Return a checked q [n, n_q_heads, head_dim] as it is, and times scale: float32 [n, n_kv_heads, group, head_dim].

    Both are the workspace's, valid until the next call. Raises `NonFiniteError`.
    """
    if q.dtype not in _CODES or q.stride(2) != 1:
        q = q.detach().to(torch.float32).contiguous()
    flat, item = (len(q), schema.n_q_heads, schema.head_dim), q.element_size()
    plain, scaled = (workspace.buffer(name, flat, np.float32) for name in ("query", "scaled query"))
    strides = item * q.stride(0), item * q.stride(1)
    if not query_kernel(_CODES[q.dtype])(q.data_ptr(), strides, scale, plain, scaled):
        raise NonFiniteError("the query holds NaN or infinity")
    shape = (len(q), schema.n_kv_heads, schema.group, schema.head_dim)
    return plain.reshape(shape), scaled.reshape(shape)
