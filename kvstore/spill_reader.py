"""Reading blocks of tables that lie on the disk only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.storage.encodings import decode_rows

if TYPE_CHECKING:
    from kvstore.recorder import Recorder
    from kvstore.row_records import RowRecords
    from kvstore.storage.catalog import ExtentRef
    from kvstore.storage.tier import Tier

Bytes = npt.NDArray[np.uint8]


class SpillReader:
    """Reads whole extents, each once a call, and hands out the blocks in them; any thread may.

    Attributes:
        extents_read, bytes_read: so far.
    """

    def __init__(self, tier: Tier, rows: RowRecords, recorder: Recorder) -> None:
        self._tier = tier
        self._recorder = recorder
        self._rows = rows
        self.extents_read = self.bytes_read = 0

    @property
    def blocks_per_extent(self) -> int:
        """Blocks of a full extent."""
        return self._rows.blocks_per_extent

    def extents(self, layer: int, refs: Iterable[ExtentRef]) -> Iterator[tuple[ExtentRef, Bytes]]:
        """Yield each extent of a layer once, refs of the same being neighbours: uint8 [n_blocks, block bytes].

        Raises `BlockNotFoundError`, `CorruptBlockError` or `StorageError`.
        """
        for ref, _ in groupby(refs):
            with self._recorder.span("read", layer):
                record, shape = self._rows.read(self._tier, layer, ref), self._rows.shape(ref)
                raw = decode_rows(record.payload, shape, record.encoding)
            self.extents_read += 1
            self.bytes_read += len(record.payload)
            data = np.frombuffer(raw, np.uint8).reshape(ref.n_blocks, -1)
            yield ref, data if data.flags.writeable else data.copy()  # torch makes no tensors of what is read-only

    def blocks(self, layer: int, blocks: Iterable[tuple[int, ExtentRef]]) -> Iterator[tuple[int, Bytes]]:
        """Yield blocks given by number and extent, ascending: the number and uint8 [block bytes], keys then values."""
        for ref, some in groupby(blocks, key=lambda block: block[1]):
            ((_, data),) = self.extents(layer, [ref])
            for number, _ in some:
                yield number, data[number - ref.number]
