"""The k largest of a vector of scores, without a heap and without a sort.

A threshold that should keep a little more than k is read from a sample; one pass without branches collects
what reaches it; an exact quickselect on what was collected gives the k-th largest value; a last pass keeps
what is above that value and, of what equals it, the lowest rows. Rows come out ascending because nothing moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.jit import jit

# NumPy scalars, not Python's: Numba compiles a callee anew for each literal it is called with.
_SAMPLE = np.int64(512)
_ABOVE, _AT_LEAST = np.bool_(False), np.bool_(True)
_SURPLUS = 1.15  # how many times k the threshold aims to keep


@jit
def select_top_k(scores: Any, k: Any, places: Any, values: Any, rows: Any, picked: Any) -> Any:
    """Write the k largest of `scores` and where they are; return how many, min(k, n).

    scores: float32 [n]; NaN counts as -inf.
    places: int32 [>= n + 1], values: float32 [>= n]: scratch, overwritten.
    rows: int64 [>= min(k, n)], out, ascending. picked: float32 [>= min(k, n)], out, `scores[rows]`.
    Order: larger score first, then lower row; the result is the first k of that order. O(n).
    """
    n = scores.shape[0]
    if k >= n:
        for i in range(n):
            rows[i] = i
            picked[i] = scores[i]
        return n
    count = _collect_above(scores, _sampled_threshold(scores, k, values), places)
    if count < k:  # the sample misled
        count = _collect_above(scores, np.float32(-np.inf), places)
    if count < k:  # NaN among the scores
        count = n
        for i in range(n):
            places[i] = i
    for i in range(count):
        x = scores[places[i]]
        values[i] = x if x == x else np.float32(-np.inf)
    kth = quickselect(values, count, k)
    return _keep(scores, places, count, kth, k, rows, picked)


@jit
def quickselect(values: Any, n: Any, k: Any) -> Any:
    """Return the k-th largest (1 <= k <= n) of values[:n], float32 without NaN; reorders them. O(n)."""
    low, high = np.int64(0), np.int64(n)  # the answer lies in values[low:high]
    want = k  # as the want-th largest there
    while high - low > 1:
        pivot = _pivot(values, low, high)
        above = _partition(values, low, high, pivot, _ABOVE)
        if low + want <= above:
            high = above
            continue
        equal = _partition(values, above, high, pivot, _AT_LEAST)
        if low + want <= equal:
            return pivot
        want -= equal - low
        low = equal
    return values[low]


@jit
def _partition(values: Any, low: Any, high: Any, pivot: Any, with_equal: Any) -> Any:
    """Move what is above the pivot (or equal, where asked) to the front; return where the rest begins.

    Swaps always and advances by the comparison's result: no branch to mispredict.
    """
    end = low
    for i in range(low, high):
        x = values[i]
        values[i] = values[end]
        values[end] = x
        end += 1 if (x > pivot or (with_equal and x == pivot)) else 0
    return end


@jit
def _pivot(values: Any, low: Any, high: Any) -> Any:
    """Median of three medians of three, spread over the range."""
    if high - low < 16:
        return values[(low + high) // 2]
    step = (high - low - 1) // 8
    a = _median(values[low], values[low + step], values[low + 2 * step])
    b = _median(values[low + 3 * step], values[low + 4 * step], values[low + 5 * step])
    c = _median(values[low + 6 * step], values[low + 7 * step], values[low + 8 * step])
    return _median(a, b, c)


@jit
def _median(a: Any, b: Any, c: Any) -> Any:
    """Middle one of three float32."""
    return max(min(a, b), min(max(a, b), c))


@jit
def _sampled_threshold(scores: Any, k: Any, values: Any) -> Any:
    """Return a value that about `_SURPLUS * k` scores should reach, from a strided sample."""
    n = scores.shape[0]
    if n < 4 * _SAMPLE:
        return np.float32(-np.inf)
    stride = n // _SAMPLE
    for i in range(_SAMPLE):
        x = scores[i * stride + (i * 7919) % stride]  # a jitter, against patterns that repeat with the stride
        values[i] = x if x == x else np.float32(-np.inf)
    share = k / n
    spread = 3.0 * np.sqrt(_SAMPLE * share * (1.0 - share))  # three standard deviations of the sample's rank
    rank = int(_SAMPLE * share * _SURPLUS + 0.4 * spread) + 4
    return quickselect(values, _SAMPLE, min(rank, _SAMPLE))


@jit
def _collect_above(scores: Any, threshold: Any, places: Any) -> Any:
    """Write the places of scores >= threshold, ascending; return how many."""
    count = 0
    for i in range(scores.shape[0]):
        places[count] = i
        count += 1 if scores[i] >= threshold else 0
    return count


@jit
def _keep(scores: Any, places: Any, count: Any, kth: Any, k: Any, rows: Any, picked: Any) -> Any:
    """Keep the places above the k-th value, and of those that equal it the first ones, k in all."""
    above = 0
    for i in range(count):
        above += 1 if scores[places[i]] > kth else 0
    ties = k - above
    written = 0
    for i in range(count):
        x = scores[places[i]]
        tie = x == kth or (x != x and kth == -np.inf)
        take = x > kth or (tie and ties > 0)
        ties -= 1 if tie else 0
        if written < k:
            rows[written] = places[i]
            picked[written] = x
        written += 1 if take else 0
    return k
