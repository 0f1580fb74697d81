"""One layer in a store, and what its attention did while it was timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.attend_peers import Layer, Reference

if TYPE_CHECKING:
    from kvstore import RopeSpec, Sequence
    from kvstore.attention import Attended
    from kvstore.planner import Plan

ROPE, RAW = "rope 1x8", "raw 2x6"
KINDS: Mapping[str, dict[str, Any]] = {
    ROPE: {"m": 1, "bits": 8, "space": "rope"},
    RAW: {"m": 2, "bits": 6, "space": "raw"},
}


@contextmanager
def stored(layer: Layer, rope: RopeSpec, kind: str) -> Iterator[Sequence]:
    """Give a sequence of one layer with these rows and an index of this kind over all of them."""
    from kvstore import IndexConfig, KVStore, Schema, StoreConfig

    heads, _, head_dim = layer.keys.shape
    dtype = str(layer.keys.dtype).removeprefix("torch.")
    schema = Schema(1, int(layer.q.shape[1]), heads, head_dim, dtype=dtype, scale=layer.scale, rope=(rope,))
    with KVStore(schema, StoreConfig(index=IndexConfig(options=dict(KINDS[kind])))) as store:
        seq = store.create("rows")
        with seq.step():
            seq.append(0, layer.keys, layer.values)
        yield seq


@dataclass
class Tap:
    """What the store's attention did, a call a line."""

    plans: list[Plan] = field(default_factory=list)
    done: list[Attended] = field(default_factory=list)

    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows that the last call attended to, int64 [n_kv_heads, n]: sinks, those chosen, tail."""
        plan, chosen = self.plans[-1], self.done[-1].chosen[0, :, : self.plans[-1].n_selected]
        kept = np.r_[plan.first : plan.sinks_stop, plan.tail_start : plan.n_rows]
        return np.concatenate([np.broadcast_to(kept, (len(chosen), len(kept))), chosen], axis=1)

    def split_ms(self) -> tuple[float, float]:
        """Medians of finding candidates, and of rerank + fetch + attention, over all calls."""
        return tuple(  # type: ignore[return-value]
            1e3 * float(np.median([getattr(one, name) for one in self.done])) for name in ("search_s", "attend_s")
        )


@contextmanager
def tapped(seq: Sequence, tap: Tap) -> Iterator[Tap]:
    """Note in tap what the store's attention does inside a `with` block: costs a microsecond a call."""
    attention = seq._store._attention
    run = attention.run

    def noted(*arguments: Any) -> Attended:
        attended = run(*arguments)
        tap.plans.extend(arguments[2])
        tap.done.append(attended)
        return attended

    attention.run = noted  # type: ignore[method-assign]
    try:
        yield tap
    finally:
        del attention.run  # the class's own again


def scan_only(seq: Sequence, q: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Score all rows that the index covers, as its search does, and select none; q [n_kv_heads, group, head_dim]."""
    from kvstore.index.scanned import RANK_NS, ScannedIndex
    from kvstore.index.threads import begin_work, end_work

    index = seq._indexes[0].index
    assert isinstance(index, ScannedIndex)
    heads, group, _ = q.shape
    scores, _ = index._workspace.take(heads, group, index.n_rows)
    before = begin_work((index._score_ns(group) + RANK_NS * group) * heads * index.n_rows)
    try:
        index._scan(q, None, index.first_row, index.stop_row, scores)
    finally:
        end_work(before)


def moved_bytes(seq: Sequence, plan: Plan, row_bytes: int) -> float:
    """Bytes that an attend has to read at least: codes if the index is asked, candidates' keys, rows attended to."""
    from kvstore.planner import INDEX

    index = seq._indexes[0].index
    assert index is not None
    codes = index.code_bytes_per_key * index.n_rows if plan.method == INDEX else 0.0
    candidates = (plan.n_candidates - plan.n_selected) * row_bytes / 2  # keys that the rerank turns down
    return index.n_kv_heads * (codes + candidates + plan.n_attended * row_bytes)


def mass_caught(found: Reference, rows: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Share of the softmax over all rows that these rows hold, int64 [n_kv_heads, n]; mean over query heads."""
    weights = np.exp(found.scores - found.scores.max(-1, keepdims=True))
    picked = np.take_along_axis(weights, rows[:, None], 2).sum(-1, dtype=np.float64)
    return float((picked / weights.sum(-1, dtype=np.float64)).mean())


def exact_rows(found: Reference, plan: Plan) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows that the plan would have attended to with exact selection, int64 [n_kv_heads, n]."""
    from kvstore.quality import best_rows

    kept = np.r_[plan.first : plan.sinks_stop, plan.tail_start : plan.n_rows]
    kept = np.broadcast_to(kept, (len(found.scores), len(kept)))
    if plan.n_selected == 0:  # the budget covers all rows
        return kept
    chosen = best_rows(found.scores[:, :, plan.sinks_stop : plan.tail_start], plan.n_selected)
    return np.concatenate([kept, plan.sinks_stop + chosen], axis=1)
