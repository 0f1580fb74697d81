"""Words of 12 bits, stored in 12 bits: blocks of 128 rows, low bytes in one plane, the rest in another.

A block holds, for each word of a row, the low bytes of its 128 rows and then 64 bytes of half bytes: rows i and
i + 64 share byte i, the first its lower half. So a block is taken apart by masks and shifts of whole vectors, and a
row can be written without moving another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.jit import jit

BLOCK_ROWS = 128
HALF_ROWS = BLOCK_ROWS // 2
LINE_BYTES = BLOCK_ROWS + HALF_ROWS

_LOW, _HIGH, _BYTE = np.uint16(15), np.uint16(4), np.uint16(8)


@jit
def write_words(words: Any, start: Any, blocks: Any) -> Any:
    """Write words uint16 [n_kv_heads, n, n_words] as rows `start` and on.

    blocks: uint8 [n_kv_heads, n_blocks, n_words, LINE_BYTES], out; the half bytes of other rows stay as they are.
    """
    heads, n, n_words = words.shape
    for h in range(heads):
        for t in range(n):
            block, place = divmod(start + t, BLOCK_ROWS)
            half, at = divmod(place, HALF_ROWS)
            for w in range(n_words):
                line, word = blocks[h, block, w], np.int64(words[h, t, w])
                line[place] = word & 255
                kept = np.int64(line[BLOCK_ROWS + at]) & (240 if half == 0 else 15)
                line[BLOCK_ROWS + at] = kept | (word >> 8) << (4 * half)


@jit
def read_words(blocks: Any, first: Any, count: Any, words: Any) -> Any:
    """Take blocks [first, first + count) of one KV head apart: uint8 [n_blocks, n_words, LINE_BYTES].

    words: uint16 [n_words, >= count * BLOCK_ROWS], out.
    """
    for w in range(blocks.shape[1]):
        for b in range(count):
            line, part = blocks[first + b, w], words[w, b * BLOCK_ROWS : (b + 1) * BLOCK_ROWS]
            for i in range(HALF_ROWS):
                part[i] = np.uint16(line[i]) | (np.uint16(line[BLOCK_ROWS + i]) & _LOW) << _BYTE
            for i in range(HALF_ROWS):
                rest = np.uint16(line[BLOCK_ROWS + i]) >> _HIGH
                part[HALF_ROWS + i] = np.uint16(line[HALF_ROWS + i]) | rest << _BYTE
