"""From keys to codes, and from a sample of keys to a codebook."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import STRICT, jit
from kvstore.index.lloyd import lloyd
from kvstore.index.nearest import ROWS, nearest


@jit(fastmath=STRICT)
def arrange(key: Any, order: Any, turns: Any, t: Any, inverse_gains: Any, j: Any, out: Any) -> Any:
    """Write sub-space j of a key, float32 [head_dim], to out, float32 [sub_dim].

    order: int64 [head_dim]. turns: float32 [2, n, head_dim / 2], cos and sin of the RoPE angles of row t, and
    inverse_gains: float32 [head_dim / 2]; with n = 0 the key is left as it is. Otherwise RoPE is undone: each
    pair is turned back by its angle (RoFormer, arXiv 2104.09864, eq. 34, transposed) and divided by its gain.
    """
    sub_dim = out.shape[0]
    place = order[j * sub_dim : (j + 1) * sub_dim]
    if turns.shape[1] == 0:
        for i in range(sub_dim):
            out[i] = key[place[i]]
        return
    n_pairs = sub_dim // 2
    for i in range(n_pairs):
        p = j * n_pairs + i
        x, y = key[place[i]] * inverse_gains[p], key[place[n_pairs + i]] * inverse_gains[p]
        c, s = turns[0, t, p], turns[1, t, p]
        out[i] = x * c + y * s
        out[n_pairs + i] = y * c - x * s


@jit(fastmath=STRICT)
def encode_rows(
    keys: Any, order: Any, turns: Any, inverse_gains: Any, laid: Any, offsets: Any, bits: Any, per_word: Any,
    start: Any, stop: Any, codes: Any,
) -> Any:  # fmt: skip
    """Write the words of keys[start:stop] of one KV head.

    keys: float32 [n, head_dim]. laid, offsets: of one head's codebook, float32 [m, sub_dim, w] and [m, w].
    codes: [n, n_words], out, uint8 or uint16. O((stop - start) * head_dim * k).
    """
    m, sub_dim, _ = laid.shape
    four = np.zeros((ROWS, sub_dim), np.float32)
    indexes = np.empty(ROWS, np.int32)
    products = np.empty(ROWS, np.float32)
    for first in range(start, stop, ROWS):
        n = min(ROWS, stop - first)
        for r in range(n):
            for w in range(codes.shape[1]):
                codes[first + r, w] = 0
        for j in range(m):
            for r in range(n):
                arrange(keys[first + r], order, turns, first + r, inverse_gains, j, four[r])
            nearest(four, 0, laid[j], offsets[j], indexes, products)
            word, shift = j // per_word, bits * (j % per_word)
            for r in range(n):
                codes[first + r, word] |= indexes[r] << shift


@jit(parallel=True)
def encode_heads(
    keys: Any, order: Any, turns: Any, inverse_gains: Any, laid: Any, offsets: Any, bits: Any, per_word: Any,
    codes: Any,
) -> Any:  # fmt: skip
    """`encode_rows` for all KV heads: keys [n_kv_heads, n, head_dim], codes [n_kv_heads, n, n_words]."""
    n = keys.shape[1]
    n_chunks = count_chunks(n)
    for task in prange(keys.shape[0] * n_chunks):
        h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
        low, high = chunk_bounds(n, n_chunks, chunk)
        encode_rows(keys[h], order, turns, inverse_gains, laid[h], offsets[h], bits, per_word, low, high, codes[h])


@jit(parallel=True)
def train_heads(
    keys: Any, sample: Any, order: Any, turns: Any, inverse_gains: Any, starts: Any, warm: Any, iterations: Any,
    centroids: Any,
) -> Any:  # fmt: skip
    """Run K-Means for each KV head and sub-space on the keys of the sampled rows.

    keys: float32 [n_kv_heads, n, head_dim]. sample: int64 [n_sample]; turns belong to the sampled rows.
    starts: int64 [n_kv_heads * m, k], sampled rows that the centroids start from, unless `warm`.
    centroids: float32 [n_kv_heads, m, k, sub_dim], in (when warm) and out.
    """
    m, k, sub_dim = centroids.shape[1:]
    for task in prange(keys.shape[0] * m):
        h, j = divmod(np.int64(task), m)
        points = np.empty((sample.shape[0], sub_dim), np.float32)
        for t in range(sample.shape[0]):
            arrange(keys[h, sample[t]], order, turns, t, inverse_gains, j, points[t])
        if not warm:
            for c in range(k):
                for i in range(sub_dim):
                    centroids[h, j, c, i] = points[starts[task, c], i]
        lloyd(points, centroids[h, j], iterations)
