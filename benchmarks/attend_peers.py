"""What one layer's attention is compared with: torch over all rows in several layouts, and what memory allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

GQA = "torch sdpa, enable_gqa"
PACKED = "torch sdpa, group as query rows"
BY_HAND = "torch matmul + softmax"
TRANSPOSED = "torch matmul + softmax, keys stored transposed"
LAYOUTS = (GQA, PACKED, BY_HAND, TRANSPOSED)
BEST = "torch's best"

_READ_BYTES = 512 << 20
_READS = 9


@dataclass(frozen=True)
class Layer:
    """One layer's rows as torch likes them best, and the queries of one decode step each.

    Attributes:
        keys, values: [n_kv_heads, n, head_dim], contiguous, all of one dtype.
        q: [n_queries, n_q_heads, head_dim], the same dtype.
        scale: of the softmax.
    """

    keys: torch.Tensor
    values: torch.Tensor
    q: torch.Tensor
    scale: float

    @property
    def n_rows(self) -> int:
        """Rows of a head."""
        return int(self.keys.shape[1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and a value of one head."""
        return 2 * int(self.keys.shape[2]) * self.keys.element_size()

    def grouped(self, i: int) -> torch.Tensor:
        """Queries of step i, [n_kv_heads, group, head_dim]."""
        return self.q[i].view(self.keys.shape[0], -1, self.q.shape[2])


def layouts(layer: Layer) -> dict[str, Callable[[int], torch.Tensor]]:
    """Return torch's ways to attend to all rows, by name: number of the query -> [n_q_heads, value_dim]."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    transposed = layer.keys.mT.contiguous()

    def gqa(i: int) -> torch.Tensor:
        q = layer.q[i][None, :, None]
        return sdpa(q, layer.keys[None], layer.values[None], scale=layer.scale, enable_gqa=True)[0, :, 0]

    def packed(i: int) -> torch.Tensor:
        out = sdpa(layer.grouped(i)[None], layer.keys[None], layer.values[None], scale=layer.scale)
        return out[0].flatten(0, 1)

    def by_hand(keys: torch.Tensor) -> Callable[[int], torch.Tensor]:
        def run(i: int) -> torch.Tensor:
            weights = torch.matmul(layer.grouped(i), keys).mul_(layer.scale).softmax(-1)
            return torch.matmul(weights, layer.values).flatten(0, 1)

        return run

    return {GQA: gqa, PACKED: packed, BY_HAND: by_hand(layer.keys.mT), TRANSPOSED: by_hand(transposed)}


@dataclass(frozen=True)
class Reference:
    """Exact attention of one query over all rows: scaled scores [n_kv_heads, group, n] and out, float32."""

    scores: np.ndarray[Any, np.dtype[np.float32]]
    out: np.ndarray[Any, np.dtype[np.float32]]


def reference(layer: Layer, i: int) -> Reference:
    """Attend with query i in float32 a head at a time; the rows are those that the dtype holds."""
    import torch

    scores, outs = [], []
    for q, keys, values in zip(layer.grouped(i).float(), layer.keys, layer.values, strict=True):
        scores.append(torch.matmul(q, keys.float().mT).mul_(layer.scale))
        outs.append(torch.matmul(scores[-1].softmax(-1), values.float()))
    return Reference(torch.stack(scores).numpy(), torch.cat(outs).numpy())


def attend_to(layer: Layer, i: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Attention of query i over these rows alone, int64 [n_kv_heads, n], in float64: [n_q_heads, value_dim]."""
    outs = []
    for head, (q, at) in enumerate(zip(layer.grouped(i).double().numpy(), rows, strict=True)):
        keys, values = (x[head][at].double().numpy() for x in (layer.keys, layer.values))
        scores = layer.scale * q @ keys.T
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ values)
    return np.concatenate(outs)


def relative_error(out: Any, wanted: Any) -> float:
    """|out - wanted| / |wanted| over everything; infinity where out holds NaN."""
    error = float(np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted))
    return error if math.isfinite(error) else math.inf


def read_bytes_per_s() -> float:
    """Bytes a second of the best of several sums over 512 MiB: what reading memory allows on these threads now."""
    import torch

    numbers = torch.ones(_READ_BYTES // 4)
    best = math.inf
    for _ in range(_READS):
        started = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - started)
    return _READ_BYTES / best
