"""Rows of tables as records, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from kvstore.errors import BlockNotFoundError, CorruptBlockError
from kvstore.schema import Schema
from kvstore.storage.catalog import ExtentRef
from kvstore.storage.encodings import Encoding, decode_rows, encode_rows
from kvstore.storage.extents import blocks_per_extent, cut_extents
from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.record import Record
from kvstore.storage.shape import RowShape
from kvstore.storage.tier import Tier
from kvstore.table import Table


class RowRecords:
    """Cuts the tables of a schema into records: several full blocks each, and one for the block that is not full."""

    def __init__(self, schema: Schema, encoding: Encoding) -> None:
        self._schema = schema
        self._encoding = encoding
        self.blocks_per_extent = blocks_per_extent(schema.block_bytes)
        self.block_tokens = schema.block_tokens
        self.n_layers = schema.n_layers

    def extents(self, first_block: int, n_rows: int, sequence: bytes, generation: int) -> list[ExtentRef]:
        """Return references for the rows from a block on, first_block a multiple of `blocks_per_extent`."""
        full, open_rows = divmod(n_rows, self._schema.block_tokens)
        cut = cut_extents(first_block, full, self.blocks_per_extent)
        rows = self._schema.block_tokens
        found = [ExtentRef(sequence, generation, blocks.start, len(blocks), len(blocks) * rows) for blocks in cut]
        if open_rows:
            found.append(ExtentRef(sequence, generation, full, 1, open_rows))
        return found

    def shape(self, ref: ExtentRef) -> RowShape:
        """Return the shape of the rows of a record."""
        s = self._schema
        return RowShape(s.dtype, ref.n_blocks, ref.n_tokens, s.n_kv_heads, s.head_dim, s.value_dim)

    def records(self, table: Table, layer: int, extents: Sequence[ExtentRef]) -> Iterator[Record]:
        """Yield the records of a table's rows."""
        for ref in extents:
            shape = self.shape(ref)
            raw = b"".join(
                self._block_bytes(table, number, shape.block_rows)
                for number in range(ref.number, ref.number + ref.n_blocks)
            )
            encoding, payload = encode_rows(raw, shape, self._encoding)
            yield Record(row_key(ref, layer), payload, shape, encoding)

    def load(self, tier: Tier, table: Table, layer: int, extents: Sequence[ExtentRef], left: range) -> None:
        """Append the rows of stored extents to an empty table; the blocks in `left` stay on the disk only.

        The end of `left` is that of a full extent.

        Raises `BlockNotFoundError` for a record that is not there, `CorruptBlockError` for one that is not what the
        catalog says, `HeapFullError`; the table is empty then.
        """
        try:
            for ref in extents:
                if ref.number < left.stop:
                    table.append_spilled(ref)
                    continue
                record = self.read(tier, layer, ref)
                raw, shape = decode_rows(record.payload, self.shape(ref), record.encoding), self.shape(ref)
                table.append_raw(raw, shape.n_blocks, shape.block_rows)
            table.bring_back(range(min(left.start, left.stop)))
        except BaseException:
            table.truncate(0)
            raise

    def read(self, tier: Tier, layer: int, ref: ExtentRef) -> Record:
        """Return one layer's record of an extent; raises `BlockNotFoundError` or `CorruptBlockError`."""
        key, shape = row_key(ref, layer), self.shape(ref)
        record = tier.get_many([key])[0]
        if record is None:
            remedy = "open the store again: its writer may have saved anew" if tier.readonly else "run check"
            raise BlockNotFoundError(f"{key} is in the catalog but not in the spill; {remedy}")
        if record.shape != shape:
            raise CorruptBlockError(f"{key} holds {record.shape}, the catalog says {shape}; run check")
        return record

    def _block_bytes(self, table: Table, number: int, n_rows: int) -> bytes:
        """Keys and then values of the first n_rows rows of a block, each [n_kv_heads, n_rows, dim]."""
        block = table.block(number)
        if n_rows == self._schema.block_tokens:
            return ctypes.string_at(block.key_address, self._schema.block_bytes)  # they lie side by side
        parts = (block.keys[:, :n_rows], block.values[:, :n_rows])
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def row_key(ref: ExtentRef, layer: int) -> RecordKey:
    """Return the key of one layer's record of an extent."""
    return RecordKey(Kind.ROWS, ref.sequence, ref.generation, layer, ref.number)
