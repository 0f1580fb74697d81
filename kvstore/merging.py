"""Putting together attention that was computed over parts of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import SchemaMismatchError

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]


@overload
def merge_attention(
    outs: Sequence[torch.Tensor] | torch.Tensor, log_norms: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def merge_attention(
    outs: Sequence[FloatArray] | FloatArray, log_norms: Sequence[FloatArray] | FloatArray
) -> tuple[FloatArray, FloatArray]: ...
def merge_attention(outs: Any, log_norms: Any) -> tuple[Any, Any]:
    """Return attention over all rows from attention over disjoint parts of them, and its log norm.

    outs: one a part, each [..., value_dim], or one array [n_parts, ..., value_dim]. log_norms: the same without the
    last dimension, the log of each softmax's denominator (log of the sum of exp(scale * q . k) over the part's rows;
    -inf for a part without rows, whose out may be anything). Torch or numpy, any float dtype; the result has the dtypes
    of the parts, and may itself be merged with others. Every part weighs exp(log_norm - that of all); computed in
    float64, so nothing is lost but the last rounding. Where no part has rows, out is 0 and the log norm -inf.

    Raises `SchemaMismatchError` for shapes that do not belong together, or no parts.

    >>> out, log_norm = merge_attention(np.array([[1.0], [3.0]]), np.log([1.0, 3.0]))
    >>> round(float(out[0]), 9), round(float(np.exp(log_norm)), 9)
    (2.5, 4.0)
    """
    _check_shapes([tuple(out.shape) for out in outs], [tuple(norm.shape) for norm in log_norms])
    parts, norms = _stacked(outs), _stacked(log_norms)
    whole = torch.logsumexp(norms.double(), 0)
    weights = (norms.double() - whole).exp()
    empty = (norms == -torch.inf)[..., None]  # 0 times what an empty part holds could be NaN
    merged = torch.where(empty, 0.0, parts.double() * weights[..., None]).sum(0).to(parts.dtype)
    log_norm = whole.to(norms.dtype)
    return (merged, log_norm) if isinstance(outs[0], torch.Tensor) else (merged.numpy(), log_norm.numpy())


def _check_shapes(outs: list[tuple[int, ...]], norms: list[tuple[int, ...]]) -> None:
    good = len(set(outs)) == 1 and len(outs) == len(norms) and set(norms) == {outs[0][:-1]} and outs[0]
    if not good:
        raise SchemaMismatchError(
            f"partial attention of shapes {outs} with log norms of shapes {norms}; give at least one part, all outs of "
            "one shape [..., value_dim], and a log norm [...] for each"
        )


def _stacked(parts: Any) -> torch.Tensor:
    if isinstance(parts[0], torch.Tensor):
        return parts if isinstance(parts, torch.Tensor) else torch.stack(list(parts))
    return torch.from_numpy(np.stack(list(parts)))
