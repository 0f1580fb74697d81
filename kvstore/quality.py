"""How good the rows are that an index picks, measured on recorded keys, values and queries.

The protocol: of the last positions of a trace every second one asks. Each query sees the rows up to its own position,
as in decoding. Sinks and window are always read; a method picks k further rows a KV head from the middle, the same
for all query heads of its group, k being a share of the trace's length *besides* sinks and window. Exact selection,
the k rows with the largest sum over the group of exact softmaxes over the middle, is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.index.base import Index
from kvstore.index.registry import make_index
from kvstore.index.rows import RowView
from kvstore.traces import Trace, TraceError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

Picker = Callable[[FloatArray, int, int, int], IntArray]
"""`pick(q, k, start, stop)`: q float32 [n_kv_heads, group, head_dim] to k distinct rows of [start, stop) a KV head,
int64 [n_kv_heads, k]."""

SHARES = (0.2, 0.1, 0.05)
ALL_ROWS, FIRST_HALF = "all rows", "first half"


@dataclass(frozen=True)
class Quality:
    """What picked rows are worth; means over query heads and queries.

    Attributes:
        mid: of the softmax mass outside sinks and window, the share that was picked.
        mass: share of all softmax mass that sinks, window and picked rows hold.
        rec: share of exact selection's rows that were picked.
        oerr: |o - o_full| / |o_full| of the attention output.
    """

    mid: float
    mass: float
    rec: float
    oerr: float

    @classmethod
    def mean(cls, found: Iterable[Quality]) -> Quality:
        """Return the mean of each figure."""
        lines = list(found)
        return cls(*(float(np.mean([getattr(line, f.name) for line in lines])) for f in fields(cls)))


@dataclass(frozen=True)
class Method:
    """An index and how it is used.

    Attributes:
        kind, options: for `make_index`; what depends on the trace (RoPE) is added where the kind takes it.
        over_fetch: candidates for each row wanted, scored again exactly (1: the index's own choice).
        codebook: rows to train on: `"all rows"` of the trace, or its `"first half"`; all rows are then encoded.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    over_fetch: float = 1.0
    codebook: str = ALL_ROWS


@dataclass(frozen=True)
class _Answer:
    """What exact attention gives for the queries of one position.

    weights: float32 [n_kv_heads, group, n_middle], softmax over all visible rows, those of the middle. middle: their
    sums, [n_kv_heads, group]. base: what sinks and window add to the output, full: the whole output, both
    [n_kv_heads, group, value_dim]. group_scores: [n_kv_heads, n_middle], what exact selection goes by.
    """

    weights: FloatArray
    middle: FloatArray
    base: FloatArray
    full: FloatArray
    group_scores: FloatArray


class Exam:
    """The queries of one trace with their exact attention; methods are marked against it.

    O(n_queries * n_q_heads * n_tokens) memory. Raises `TraceError` when the trace is too short for a middle.
    """

    def __init__(self, trace: Trace, *, sinks: int = 4, window: int = 64, every: int = 2) -> None:
        first_stop = trace.n_tokens - trace.n_queries + 1 - window
        if first_stop - sinks < 2:
            raise TraceError(
                f"{trace.n_tokens} tokens with {trace.n_queries} queries leave no rows between {sinks} sinks and a "
                f"window of {window}: capture more tokens"
            )
        self.trace, self.sinks, self.window = trace, sinks, window
        self._values = np.ascontiguousarray(trace.v, np.float32)
        self._heads = np.arange(trace.n_kv_heads)[:, None]
        self._answers = {i: self._answer(i) for i in range(0, trace.n_queries, every)}

    @property
    def stop_row(self) -> int:
        """One past the last row that any query may pick; an index of the trace covers [sinks, stop_row)."""
        return self.trace.n_tokens - self.window

    def rows_of(self, share: float) -> int:
        """Rows a KV head that a share of the trace stands for."""
        return max(1, round(share * self.trace.n_tokens))

    def mark(self, pick: Picker, share: float) -> Quality:
        """Let a method answer every query with the share's number of rows, and return the mean of its marks."""
        marks = []
        for i, answer in self._answers.items():
            stop = self._stop(i)
            k = min(self.rows_of(share), stop - self.sinks)
            marks.append(self._mark(answer, pick(self.trace.queries(i), k, self.sinks, stop), k))
        return Quality.mean(marks)

    def exact(self, q: FloatArray, k: int, start: int, stop: int) -> IntArray:
        """Pick exactly: the reference, as a `Picker`."""
        return start + best_rows(self._scores(q, start, stop), k)

    def reranked(self, pick: Picker, over_fetch: float) -> Picker:
        """Return a picker that takes over_fetch * k rows of `pick`, scores them exactly and keeps the best k.

        The softmax of the rerank runs over the candidates alone, as in the store: no more keys are read.
        """

        def run(q: FloatArray, k: int, start: int, stop: int) -> IntArray:
            rows = pick(q, min(stop - start, round(over_fetch * k)), start, stop)
            keys = self.trace.keys[self._heads, rows]
            scores = self.trace.scale * np.matmul(q, keys.swapaxes(1, 2))
            kept: IntArray = np.take_along_axis(rows, best_rows(scores, k), 1)
            return kept

        return pick if over_fetch == 1 else run

    def _stop(self, i: int) -> int:
        """One past the last row of the middle for query i."""
        return self.trace.n_tokens - self.trace.n_queries + i + 1 - self.window

    def _scores(self, q: FloatArray, start: int, stop: int) -> FloatArray:
        keys = self.trace.keys
        return np.stack([self.trace.scale * (q[h] @ keys[h, start:stop].T) for h in range(len(q))])

    def _answer(self, i: int) -> _Answer:
        low, high = self.sinks, self._stop(i)
        n = high + self.window
        scores = self._scores(self.trace.queries(i), 0, n)
        weights = _softmax(scores)
        full = np.stack([weights[h] @ self._values[h, :n] for h in range(len(weights))])
        middle = np.ascontiguousarray(weights[:, :, low:high])
        taken = np.stack([middle[h] @ self._values[h, low:high] for h in range(len(weights))])
        return _Answer(middle, middle.sum(2), full - taken, full, _softmax(scores[:, :, low:high]).sum(1))

    def _mark(self, answer: _Answer, rows: IntArray, k: int) -> Quality:
        places, n_middle = rows - self.sinks, answer.weights.shape[2]
        chosen = np.zeros((len(rows), n_middle), bool)
        if rows.shape != (len(rows), k) or places.min() < 0 or places.max() >= n_middle:
            raise ValueError(f"a method must pick {k} rows of the middle, not {rows.shape[1]} or rows outside it")
        chosen[self._heads, places] = True
        if chosen.sum() != rows.size:
            raise ValueError("a method picked a row twice")
        rec = chosen[self._heads, _largest(answer.group_scores, k)].mean()
        weights = np.take_along_axis(answer.weights, places[:, None], 2)
        picked = weights.sum(2)
        mass = 1 - answer.middle + picked
        out = (answer.base + np.matmul(weights, self._values[self._heads, rows])) / mass[:, :, None]
        error = np.linalg.norm(out - answer.full, axis=2) / np.linalg.norm(answer.full, axis=2)
        share = np.divide(picked, answer.middle, out=np.ones_like(picked), where=answer.middle > 0)
        return Quality(float(share.mean()), float(mass.mean()), float(rec), float(error.mean()))


def build_index(exam: Exam, method: Method, other: Trace | None = None) -> Index:
    """Return the method's index of the trace's rows between sinks and window.

    With `other`, a trace of the same layer, the codebook is trained on its rows. Raises `ConfigError` for options
    that the kind does not have, `TraceError` when the traces do not fit.
    """
    trace, start, stop = exam.trace, exam.sinks, exam.stop_row
    keys, positions = trace.keys[:, start:stop], np.arange(start, stop)
    index = new_index(trace, method, start)
    seen = other if other is not None else trace
    extra = {} if method.options.get("weighting") is None else {"moments": seen.query_moments()}
    if other is not None:
        if (other.n_kv_heads, other.head_dim, other.layer) != (trace.n_kv_heads, trace.head_dim, trace.layer):
            raise TraceError(f"a codebook of layer {other.layer} of {other.model} does not fit layer {trace.layer}")
        index.train(other.keys, np.arange(other.n_tokens), **extra)
    else:
        n_train = (stop - start) // 2 if method.codebook == FIRST_HALF else stop - start
        index.train(keys[:, :n_train], positions[:n_train], **extra)
    index.add(keys, positions)
    return index


def new_index(trace: Trace, method: Method, first_row: int = 0) -> Index:
    """Return an empty index of the method's kind for a trace's keys."""
    options = {**method.options, "first_row": first_row}
    if method.kind != "flat":
        options["rope"] = trace.rope
    try:
        return make_index(method.kind, trace.n_kv_heads, trace.head_dim, **options)
    except TypeError as error:  # a setting that the kind does not have
        raise ConfigError(f"no index of kind {method.kind!r} with {dict(method.options)}: {error}") from error


def index_picker(exam: Exam, index: Index) -> Picker:
    """Return a picker that searches an index of the exam's trace."""
    view, scale = RowView.of(exam.trace.keys), exam.trace.scale

    def pick(q: FloatArray, k: int, start: int, stop: int) -> IntArray:
        return index.search(q, k, view, scale=scale, start=start, stop=stop).rows

    return pick


def measure(exams: Sequence[Exam], method: Method, shares: Sequence[float] = SHARES) -> dict[float, Quality]:
    """Build the method's index for each exam and return the mean quality over them, by share of the rows."""
    found: dict[float, list[Quality]] = {share: [] for share in shares}
    for exam in exams:
        pick = exam.reranked(index_picker(exam, build_index(exam, method)), method.over_fetch)
        for share in shares:
            found[share].append(exam.mark(pick, share))
    return {share: Quality.mean(marks) for share, marks in found.items()}


def best_rows(scores: FloatArray, k: int) -> IntArray:
    """Return the k columns with the largest sum over the group of softmaxes of scaled scores, [n_kv_heads, k].

    scores: float32 [n_kv_heads, group, n]; columns ascending in each line.
    """
    return _largest(_softmax(scores).sum(1), k)


def _softmax(scores: FloatArray) -> FloatArray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    normal: FloatArray = weights / weights.sum(-1, keepdims=True)
    return normal


def _largest(values: FloatArray, k: int) -> IntArray:
    """Columns of the k largest of each line of [n_lines, n], ascending."""
    if k >= values.shape[1]:
        return np.broadcast_to(np.arange(values.shape[1]), values.shape).copy()
    order = np.argpartition(-values, k - 1, axis=1)[:, :k]
    return np.sort(order, axis=1).astype(np.int64)
