"""The k largest of a vector of scores, without a heap and without a sort.

Two values between which the k-th largest should lie are read from a sample. One pass without branches collects what
reaches the lower one; of that, what does not exceed the upper one, a few percent, goes through an exact quickselect; a
last pass keeps what is above the k-th value and, of what equals it, the lowest rows. Rows come out ascending because
nothing moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.compress import LANES, append_reaching
from kvstore.index.jit import jit

# NumPy scalars, not Python's: Numba compiles a callee anew for each literal it is called with.
_FEWEST, _MOST = np.int64(512), np.int64(2048)
"""Bounds of the sample: a sixteenth of the scores between them; fewer than four samples are all looked at."""
_ABOVE, _AT_LEAST = np.bool_(False), np.bool_(True)
_SPREADS = 3.0  # standard deviations of a sample's rank on either side


@jit
def select_top_k(scores: Any, k: Any, places: Any, values: Any, rows: Any, picked: Any) -> Any:
    """Write the k largest of `scores` and where they are; return how many, min(k, n).

    scores: float32 [n], C-order; NaN counts as -inf.
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
    low, high = _bracket(scores, k, values)
    count = _collect_above(scores, low, places)
    if count < k:  # the sample misled
        count = _collect_above(scores, np.float32(-np.inf), places)
    if count < k:  # NaN among the scores
        count = n
        for i in range(n):
            places[i] = i
    inside = _collect_values(scores, places, count, high, values)
    if count - inside >= k:  # it misled at the other end
        inside = _collect_values(scores, places, count, np.float32(np.inf), values)
    above = count - inside
    kth = quickselect(values, inside, k - above)
    equal = 0
    for i in range(inside):
        above += 1 if values[i] > kth else 0
        equal += 1 if values[i] == kth else 0
    if above + equal == k:
        return _keep_from(scores, places, count, kth, k, rows, picked)
    return _keep(scores, places, count, kth, k, k - above, rows, picked)


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
def _bracket(scores: Any, k: Any, values: Any) -> Any:
    """Return two values between which the k-th largest score should lie, from a strided sample."""
    n = scores.shape[0]
    size = min(max(n // 16, _FEWEST), _MOST)
    if n < 4 * size:
        return np.float32(-np.inf), np.float32(np.inf)
    stride = n // size
    for i in range(size):
        x = scores[i * stride + (i * 7919) % stride]  # a jitter, against patterns that repeat with the stride
        values[i] = x if x == x else np.float32(-np.inf)
    share = k / n
    spread = _SPREADS * np.sqrt(size * share * (1.0 - share))
    last = min(int(size * share + spread) + 4, size)
    low = quickselect(values, size, last)
    first = int(size * share - spread) - 4
    return low, quickselect(values, last, first) if first > 0 else np.float32(np.inf)


@jit
def _collect_above(scores: Any, threshold: Any, places: Any) -> Any:
    """Write the places of scores >= threshold, ascending; return how many."""
    count = np.int64(0)
    n, base, out = scores.shape[0], scores.ctypes.data, places.ctypes.data
    whole = n // LANES * LANES
    for first in range(0, whole, LANES):
        count = append_reaching(base + first * 4, first, threshold, out, count)
    for i in range(whole, n):
        places[count] = i
        count += 1 if scores[i] >= threshold else 0
    return count


@jit
def _collect_values(scores: Any, places: Any, count: Any, high: Any, values: Any) -> Any:
    """Write the scores at places that do not exceed `high`, NaN as -inf; return how many."""
    inside = 0
    for i in range(count):
        x = scores[places[i]]
        values[inside] = x if x == x else np.float32(-np.inf)
        inside += 0 if x > high else 1
    return inside


@jit
def _keep_from(scores: Any, places: Any, count: Any, kth: Any, k: Any, rows: Any, picked: Any) -> Any:
    """Keep the places that reach the k-th value where those are k; NaN counts as -inf."""
    written = 0
    for i in range(count):
        x = scores[places[i]]
        if written < k:
            rows[written] = places[i]
            picked[written] = x
        written += 1 if (x >= kth or (x != x and kth == -np.inf)) else 0
    return k


@jit
def _keep(scores: Any, places: Any, count: Any, kth: Any, k: Any, ties: Any, rows: Any, picked: Any) -> Any:
    """Keep the places above the k-th value, and of those that equal it the first `ties`, k in all."""
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
