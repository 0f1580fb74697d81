"""Codes of one bit a dimension: turning, taking signs, and inner products with signs by look-up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kvstore.index.chunks import chunk_bounds, count_chunks
from kvstore.index.jit import jit

_VALUES = 256  # of a byte of signs


@jit(parallel=True)
def encode_signs(keys: Any, rotation: Any, centre: Any, start: Any, codes: Any, factors: Any) -> Any:
    """Write the signs and the factor of each key, from row offset `start` on; KV heads and chunks in parallel.

    keys: float32 [n_kv_heads, n, head_dim]. rotation: float32 [head_dim, head_dim]. centre: float32 [n_kv_heads,
    head_dim]. codes: uint8 [n_kv_heads, >= start + n, ceil(head_dim / 8)], out; dimension i is bit i % 8 of byte
    i // 8, 1 for a positive number. factors: float32 [n_kv_heads, >= start + n, 1], out: |o|^2 / sum |o_i| of the
    turned residual o. O(n * head_dim^2) a KV head.
    """
    n_heads, n, head_dim = keys.shape
    n_chunks = count_chunks(n)
    for task in prange(n_heads * n_chunks):
        h, chunk = divmod(np.int64(task), n_chunks)  # prange counts in uint64
        low, high = chunk_bounds(n, n_chunks, chunk)
        turned = np.empty(head_dim, np.float32)
        for t in range(low, high):
            _turn(keys[h, t], centre[h], rotation, turned)
            factors[h, start + t, 0] = _factor(turned)
            _pack_signs(turned, codes[h, start + t])


@jit
def _turn(key: Any, centre: Any, rotation: Any, turned: Any) -> Any:
    """Write (key - centre) @ rotation, in the same order of sums whatever comes before or after the row."""
    head_dim = key.shape[0]
    for j in range(head_dim):
        turned[j] = 0.0
    for i in range(head_dim):
        x = key[i] - centre[i]
        line = rotation[i]
        for j in range(head_dim):
            turned[j] += x * line[j]


@jit
def _factor(turned: Any) -> Any:
    """Squared norm over the sum of magnitudes; 0 for a key at the centre, whose signs mean nothing."""
    square: Any = 0.0
    total: Any = 0.0
    for i in range(turned.shape[0]):
        x = np.float64(turned[i])
        square += x * x
        total += abs(x)
    return np.float32(square / total) if total > 0 else np.float32(0.0)


@jit
def _pack_signs(turned: Any, line: Any) -> Any:
    """Write one bit a dimension, set where it is above 0: float32 [head_dim] to uint8 [ceil(head_dim / 8)]."""
    for j in range(line.shape[0]):
        byte = 0
        for i in range(8 * j, min(8 * j + 8, turned.shape[0])):
            byte |= (1 if turned[i] > 0 else 0) << (i - 8 * j)
        line[j] = byte


@jit(parallel=True)
def scan_signs(codes: Any, factors: Any, turned_q: Any, offsets: Any, start: Any, stop: Any, out: Any) -> Any:
    """Score rows [start, stop) of all KV heads: offset + factor * (sum over dimensions of sign * turned_q).

    codes, factors: see `encode_signs`. turned_q: float32 [n_kv_heads, group, 8 * n_bytes], zero behind head_dim.
    offsets: float32 [n_kv_heads, group]. out: float32 [n_kv_heads, >= group, >= stop - start].
    The sum takes one look-up a byte, in tables of 1 KiB a byte and query head.
    """
    n_heads, group, width = turned_q.shape
    n_chunks = count_chunks(stop - start)
    tables = np.empty((n_heads, group, width // 8 * _VALUES), np.float32)
    for task in prange(n_heads * group):
        h, g = divmod(np.int64(task), group)
        _fill_tables(turned_q[h, g], tables[h, g])
    for task in prange(n_heads * n_chunks):
        h, chunk = divmod(np.int64(task), n_chunks)
        low, high = chunk_bounds(stop - start, n_chunks, chunk)
        for g in range(group):
            _look_up(codes[h], factors[h], tables[h, g], offsets[h, g], start, low, high, out[h, g])


@jit
def _fill_tables(turned_q: Any, tables: Any) -> Any:
    """Write what each value of each byte adds up to: float32 [n_bytes * 256]."""
    for j in range(turned_q.shape[0] // 8):
        table = tables[j * _VALUES : (j + 1) * _VALUES]
        none: Any = np.float32(0.0)
        for i in range(8):
            none -= turned_q[8 * j + i]
        table[0] = none
        for i in range(8):
            twice = turned_q[8 * j + i] + turned_q[8 * j + i]  # from minus to plus
            filled = 1 << i
            for c in range(filled):
                table[filled + c] = table[c] + twice


@jit
def _look_up(codes: Any, factors: Any, tables: Any, offset: Any, start: Any, low: Any, high: Any, out: Any) -> Any:
    """Score rows start + [low, high) of one KV head and query head to out[low:high], float32; codes [n, n_bytes]."""
    n_bytes = codes.shape[1]
    whole = n_bytes - n_bytes % 4
    for t in range(low, high):
        line = codes[start + t]
        total: Any = np.float32(0.0)
        for j in range(0, whole, 4):  # four at a time: look-ups that do not wait for each other
            base = j * _VALUES
            first = tables[base + line[j]] + tables[base + _VALUES + line[j + 1]]
            second = tables[base + 2 * _VALUES + line[j + 2]] + tables[base + 3 * _VALUES + line[j + 3]]
            total += first + second
        for j in range(whole, n_bytes):
            total += tables[j * _VALUES + line[j]]
        out[t] = offset + factors[start + t, 0] * total
