"""A recorded text played into a store, the first part as prompt, the rest as if it were generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.speed import WrongResultError

if TYPE_CHECKING:
    from kvstore import KVStore
    from kvstore.explain import Explanation
    from kvstore.traces import Trace

SINKS, WINDOW = 4, 64
STEP = 32
"""Rows appended at a time, at most; each step is encoded at once, so that no rows wait outside the index and every
policy picks from the same rows."""
TOLERANCE = 1e-4
NEVER, BY_DRIFT, AUTO, ALWAYS = "never", "by itself above drift 2", 'codebook="auto"', "at each length"
POLICIES: Mapping[str, Mapping[str, Any]] = {
    NEVER: {},
    BY_DRIFT: {"reindex_drift": 2.0},
    AUTO: {"codebook": "auto"},
    ALWAYS: {},
}
"""When the index is trained again, and the settings of `IndexConfig` for it; ALWAYS calls `reindex`."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "rope 1x8": {"space": "rope", "m": 1, "bits": 8},
    "raw 2x6": {"space": "raw", "m": 2, "bits": 6},
    "raw 4x8": {"space": "raw", "m": 4, "bits": 8},
}


@dataclass(frozen=True)
class Point:
    """Means over the layers and the queries about one length behind the prompt.

    Attributes:
        mid: of the attention mass between sinks and window, the share in rows picked; exact_mid: in as many rows of
            exact selection. mass: caught of all attention mass.
        drift: error of recent rows relative to training, NaN where it is not known.
        builds: trainings of a layer's index so far.
    """

    mid: float
    exact_mid: float
    mass: float
    drift: float
    builds: float

    @classmethod
    def mean(cls, found: Sequence[Point]) -> Point:
        """Return the mean of each figure; of those that are known, for drift."""
        columns = {f.name: np.array([getattr(one, f.name) for one in found]) for f in fields(cls)}
        known = {name: column[np.isfinite(column)] for name, column in columns.items()}
        return cls(**{name: float(column.mean()) if len(column) else float("nan") for name, column in known.items()})


def budget_rule(share: float) -> Any:
    """Return a budget of a share of the rows *besides* sinks and window, as `kvstore.quality` counts."""
    return lambda layer, head, rows: SINKS + WINDOW + max(1, round(share * rows))


def bins(trace: Trace, prompt: int, factors: Sequence[float], width: int) -> dict[float, list[int]]:
    """Return numbers of the queries (see `queries_of`) by generated length, in prompts: those about that far behind it.

    At 0 the width begins behind the prompt, elsewhere it is centred; a length without queries raises `ValueError`.
    """
    positions, _ = queries_of(trace)
    found = {}
    for factor in factors:
        middle = round(prompt * (1 + factor))
        low = min(middle, trace.n_tokens - width) if factor == 0 else min(middle - width // 2, trace.n_tokens - width)
        found[factor] = np.flatnonzero((positions >= low) & (positions < low + width)).tolist()
        if not found[factor]:
            raise ValueError(f"no query was recorded within {width} tokens about position {middle}")
    return found


def queries_of(trace: Trace) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return all queries of a trace: positions, int64 [n], and queries, float32 [n_q_heads, n, head_dim]."""
    last = np.arange(trace.n_tokens - trace.n_queries, trace.n_tokens)
    if trace.q_cal is None or trace.cal_pos is None:
        return last, np.asarray(trace.q, np.float32)
    positions = np.concatenate([trace.cal_pos.astype(np.int64), last])
    return positions, np.concatenate([trace.q_cal, trace.q], 1).astype(np.float32)


def play(
    traces: Sequence[Trace], kind: str, policy: str, prompt: int, share: float, places: Mapping[float, Sequence[int]]
) -> dict[float, Point]:
    """Read the prompt, append the rest up to each query, ask, and return what was found by generated length.

    Raises `WrongResultError` for an answer that cannot be right.
    """
    import torch

    positions, _ = queries_of(traces[0])
    queries = [torch.from_numpy(queries_of(trace)[1]) for trace in traces]
    found: dict[float, Point] = {}
    with _store(traces, kind, policy, share) as store:
        seq = store.create("text")
        _append(store, traces, prompt)
        for factor, numbers in sorted(places.items()):
            marks = []
            if policy == ALWAYS and factor > 0:
                _grow(store, traces, int(positions[numbers[0]]))
                seq.reindex()
            for number in numbers:
                _grow(store, traces, int(positions[number]) + 1)
                for layer, trace in enumerate(traces):
                    answer = seq.explain(layer, queries[layer][:, number], analyze=True)
                    marks.append(_mark(answer, trace, queries[layer][:, number].numpy(), _builds(store, layer)))
            found[factor] = Point.mean(marks)
    return found


@contextmanager
def _store(traces: Sequence[Trace], kind: str, policy: str, share: float) -> Iterator[KVStore]:
    from kvstore import IndexConfig, KVStore, Schema, StoreConfig

    first = traces[0]
    schema = Schema(
        len(traces),
        int(first.q.shape[0]),
        first.n_kv_heads,
        first.head_dim,
        value_dim=int(first.v.shape[2]),
        scale=first.scale,
        rope=tuple(trace.rope for trace in traces),
    )
    index = IndexConfig(options=dict(KINDS[kind]), append_rows=1, **POLICIES[policy])
    config = StoreConfig(
        sinks=SINKS, window=WINDOW, budget=budget_rule(share), dense_rows=0, min_selected=1, index=index
    )
    with KVStore(schema, config) as store:
        yield store


def _grow(store: KVStore, traces: Sequence[Trace], n_rows: int) -> None:
    """Append rows up to n_rows; what trains in the background is waited for, so that runs are the same each time."""
    while len(store["text"]) < n_rows:
        _append(store, traces, min(n_rows, len(store["text"]) + STEP))
        store.wait()


def _append(store: KVStore, traces: Sequence[Trace], stop: int) -> None:
    import torch

    seq = store["text"]
    start = len(seq)
    with seq.step():
        for layer, trace in enumerate(traces):
            keys, values = (np.asarray(x[:, start:stop], np.float32) for x in (trace.k, trace.v))
            seq.append(layer, torch.from_numpy(keys), torch.from_numpy(values))


def _builds(store: KVStore, layer: int) -> int:
    return store["text"]._indexes[layer].n_builds


def _mark(answer: Explanation, trace: Trace, q: np.ndarray[Any, Any], builds: int) -> Point:
    """Compare an answer with the exact softmax; raises `WrongResultError` unless its rows and shares are right."""
    plan, measured = answer.plan, answer.measured
    assert measured is not None
    weights = _weights(trace, q, plan.n_rows)
    middle = weights[:, :, plan.sinks_stop : plan.tail_start]
    shares = middle / middle.sum(2, keepdims=True)
    rows = measured.chosen - plan.sinks_stop
    if rows.min() < 0 or rows.max() >= shares.shape[2] or any(len(set(r)) < len(r) for r in rows.tolist()):
        raise WrongResultError(f"{answer.sequence}, layer {answer.layer}: rows outside the middle, or a row twice")
    mid = float(np.take_along_axis(shares, rows[:, None], 2).sum(2).mean())
    best = np.argpartition(-shares.sum(1), plan.n_selected - 1, axis=1)[:, : plan.n_selected]
    exact = float(np.take_along_axis(shares, best[:, None], 2).sum(2).mean())
    if not abs(mid - measured.middle_mass) <= TOLERANCE or mid > exact + TOLERANCE:
        raise WrongResultError(
            f"layer {answer.layer}, {plan.n_rows} rows: the share found is said to be {measured.middle_mass:.5f}, is "
            f"{mid:.5f}, and exact selection finds {exact:.5f}"
        )
    drift = float((answer.index or {}).get("drift", float("nan")))
    return Point(mid, exact, measured.mass, drift, float(builds))


def _weights(trace: Trace, q: np.ndarray[Any, Any], n_rows: int) -> np.ndarray[Any, Any]:
    """Softmax of q [n_q_heads, head_dim] over the first rows, float64 [n_kv_heads, group, n_rows]."""
    grouped = q.reshape(trace.n_kv_heads, trace.group, -1)
    scores = trace.scale * np.matmul(grouped, trace.keys[:, :n_rows].swapaxes(1, 2)).astype(np.float64)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    normal: np.ndarray[Any, Any] = weights / weights.sum(2, keepdims=True)
    return normal
