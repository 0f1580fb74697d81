"""Checks at the edge: one clear error for each kind of bad input, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidQueryError, LayerNotFoundError, NonFiniteError, SchemaMismatchError
from kvstore.schema import Schema

SAMPLED_QUERIES = 1024


def check_layer(schema: Schema, layer: int) -> None:
    """Raise `LayerNotFoundError` unless the layer exists."""
    if not is_integer(layer) or not 0 <= layer < schema.n_layers:
        raise LayerNotFoundError(f"layer {layer!r} does not exist: the schema has layers 0 to {schema.n_layers - 1}")


def check_head(schema: Schema, head: int) -> None:
    """Raise `LayerNotFoundError` unless the KV head exists."""
    if not is_integer(head) or not 0 <= head < schema.n_kv_heads:
        raise LayerNotFoundError(f"KV head {head!r} does not exist: the schema has heads 0 to {schema.n_kv_heads - 1}")


def check_new_rows(schema: Schema, keys: torch.Tensor, values: torch.Tensor, n_sequences: int | None) -> None:
    """Raise `SchemaMismatchError` unless keys and values are rows of the schema: shape, dtype, device.

    They are [n_kv_heads, n, dim], or [n_sequences, n_kv_heads, n, dim] where n_sequences is given.
    """
    _check_tensor(schema, "keys", keys, schema.head_dim, n_sequences)
    _check_tensor(schema, "values", values, schema.value_dim, n_sequences)
    if keys.shape[-2] != values.shape[-2]:
        raise SchemaMismatchError(f"{keys.shape[-2]} keys came with {values.shape[-2]} values")


def check_row_numbers(keys: torch.Tensor) -> None:
    """Raise `NonFiniteError` unless keys are finite."""
    if not _finite(keys):
        bad = (~torch.isfinite(keys)).nonzero()[0].tolist()
        where = "[head, row, dim]" if keys.ndim == 3 else "[sequence, head, row, dim]"
        raise NonFiniteError(f"keys hold {keys[tuple(bad)].item()} at {where} = {bad}; nothing was appended")


def check_positions(positions: npt.ArrayLike | torch.Tensor | None, n: int) -> npt.NDArray[np.int64] | None:
    """Return positions as int64 [n]; raise `SchemaMismatchError` unless there is one non-negative integer a row."""
    if positions is None:
        return None
    array = np.asarray(positions)
    if array.shape != (n,) or array.dtype.kind not in "iu" or (n and array.min() < 0):
        raise SchemaMismatchError(
            f"positions must be {n} non-negative integers, one a row, not {array.dtype} {list(array.shape)}"
        )
    return array.astype(np.int64)


def check_query(q: torch.Tensor, shape: SequenceABC[int]) -> None:
    """Raise unless q is a floating-point CPU tensor of this shape; `query_array` looks at its numbers."""
    if not isinstance(q, torch.Tensor) or not q.is_floating_point():
        what = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        raise SchemaMismatchError(f"a query must be a floating-point torch.Tensor, not {what}")
    if q.shape != tuple(shape):
        raise SchemaMismatchError(f"the query has shape {list(q.shape)}, the schema wants {list(shape)}")
    if not q.is_cpu:
        raise SchemaMismatchError(f"the query is on {q.device}, the rows are on cpu; use q.cpu()")


def query_array(q: torch.Tensor, shape: SequenceABC[int]) -> npt.NDArray[np.float32]:
    """Return a checked query as a contiguous float32 array of this shape; raise `NonFiniteError` unless finite."""
    array: npt.NDArray[np.float32] = q.detach().to(torch.float32).contiguous().numpy().reshape(shape)
    if not np.isfinite(array).all():
        raise NonFiniteError("the query holds NaN or infinity")
    return array


def query_sample(schema: Schema, q: torch.Tensor) -> npt.NDArray[np.float32]:
    """Return at most 1,024 queries of each head of q [n_q_heads, n, head_dim] as float32 [n_kv_heads, m, head_dim]."""
    if not isinstance(q, torch.Tensor) or q.ndim != 3 or q.shape[::2] != (schema.n_q_heads, schema.head_dim):
        shape = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise SchemaMismatchError(f"queries must be [{schema.n_q_heads}, n_tokens, {schema.head_dim}], not {shape}")
    step = -(-q.shape[1] // SAMPLED_QUERIES) or 1
    return query_array(q[:, ::step], (schema.n_kv_heads, -1, schema.head_dim))


def as_group(schema: Schema, q: torch.Tensor) -> torch.Tensor:
    """Return q as [1, group, head_dim] or [1, 1, head_dim]; raise unless it is [group, head_dim] or [head_dim]."""
    single = isinstance(q, torch.Tensor) and q.ndim == 1
    check_query(q, (schema.head_dim,) if single else (schema.group, schema.head_dim))
    return q[None, None] if single else q[None]


def check_k(k: int | None) -> int:
    """Return k; raise `InvalidQueryError` unless it is a positive integer."""
    if k is None or not is_integer(k) or k < 1:
        raise InvalidQueryError(f"k must be an integer of at least 1, not {k!r}")
    return int(k)


def check_mass(mass: float, k: int | None, reduce: str | None) -> None:
    """Raise `InvalidQueryError` unless mass is a share in (0, 1] and nothing else says how many rows are wanted."""
    if k is not None:
        raise InvalidQueryError(f"give k or mass, not both (k={k!r}, mass={mass!r})")
    if reduce not in (None, "sum_softmax"):
        raise InvalidQueryError(f"mass is a share of the softmax; it does not go with reduce={reduce!r}")
    if isinstance(mass, bool) or not isinstance(mass, (int, float)) or not 0.0 < mass <= 1.0:
        raise InvalidQueryError(f"mass must be a share in (0, 1], not {mass!r}")


def check_beta(beta: float) -> None:
    """Raise `InvalidQueryError` unless beta is a finite number of at least 0."""
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0.0 <= beta < math.inf:
        raise InvalidQueryError(f"beta must be finite and at least 0, not {beta!r}")


def check_scale(scale: float) -> None:
    """Raise `InvalidQueryError` unless the softmax scale is a positive, finite number."""
    if not isinstance(scale, (int, float, np.number)) or isinstance(scale, bool) or not 0.0 < scale < math.inf:
        raise InvalidQueryError(f"scale must be positive and finite, not {scale!r}; usual is head_dim ** -0.5")


def check_row_ids(positions: npt.ArrayLike | torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return row ids as int64 [n]; raise `InvalidQueryError` unless each is in [0, n_rows)."""
    rows = torch.as_tensor(positions)
    if rows.shape == (0,):
        return torch.empty(0, dtype=torch.int64)  # an empty list has no dtype to speak of
    if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise InvalidQueryError(f"positions must be integers [n], not {rows.dtype} {list(rows.shape)}")
    rows = rows.to("cpu", torch.int64)
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < n_rows:
        raise InvalidQueryError(
            f"positions run from {int(rows.min())} to {int(rows.max())}, the sequence has the rows 0 to {n_rows - 1}"
        )
    return rows


def is_integer(x: object) -> bool:
    """Whether x is an integer of Python or numpy, and not a bool."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _check_tensor(schema: Schema, name: str, x: torch.Tensor, dim: int, n_sequences: int | None) -> None:
    if not isinstance(x, torch.Tensor):
        raise SchemaMismatchError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    shape, leading = x.shape, () if n_sequences is None else (n_sequences,)
    if len(shape) != 3 + len(leading) or shape[:-2] != (*leading, schema.n_kv_heads) or shape[-1] != dim:
        wanted = f"n_kv_heads={schema.n_kv_heads}, n_tokens, {dim}"
        if n_sequences is not None:
            wanted = f"n_sequences={n_sequences}, {wanted}"
        raise SchemaMismatchError(f"{name} have shape {list(shape)}, the schema wants [{wanted}]")
    if x.dtype != schema.torch_dtype:
        raise SchemaMismatchError(f"{name} are {x.dtype}, the schema holds {schema.dtype}; use .to(schema.torch_dtype)")
    if not x.is_cpu:
        raise SchemaMismatchError(f"{name} are on {x.device}, the heap is on cpu; use .cpu()")


def _finite(x: torch.Tensor) -> bool:
    # A sum is finite only if every term is, and costs a third of isfinite().all(); a sum that overflows is asked again.
    with torch.no_grad():
        return x.numel() == 0 or math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())
