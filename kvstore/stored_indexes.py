"""The indexes of sequences on the disk: which are worth writing again, and how one comes back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.archive import Archive
from kvstore.errors import CorruptStoreError, UnsupportedFormatError
from kvstore.index_builder import IndexBuilder
from kvstore.index_state import VERSIONS, decode_index, encode_index, version_of
from kvstore.logs import log, log_event
from kvstore.storage.catalog import IndexRef

if TYPE_CHECKING:
    from kvstore.sequence import Sequence

GROWTH = 8
"""An index that was only added to is stored again once it has grown by an eighth: rows after it are coded when the
store is opened."""


class StoredIndexes:
    """Writes and reads the indexes of an archive's sequences."""

    def __init__(self, archive: Archive, builder: IndexBuilder) -> None:
        self._archive = archive
        self._builder = builder

    def load(self, seq: Sequence, layer: int, ref: IndexRef | None) -> tuple[int, int]:
        """Give a table its stored index, if that is sound; returns what `mark` would, as it lies on the disk."""
        if ref is None:
            return 0, 0
        try:
            if ref.version not in VERSIONS or ref.kind != self._builder.config.index.kind:
                raise CorruptStoreError(f"it is of kind {ref.kind!r}, version {ref.version}")
            built = decode_index(self._archive.load_index(ref, layer), self._builder, layer, ref.first_row)
            seq._indexes[layer].restore(built)
            return 0, built.index.n_rows
        except (CorruptStoreError, UnsupportedFormatError) as error:  # rows are there, so an index can be made again
            what = {"sequence": seq.name, "layer": layer, "reason": str(error)}
            text = "the index of layer %(layer)d of %(sequence)r is built again: %(reason)s"
            log_event(log, logging.WARNING, "index.rebuilt", text, **what)
            seq._saved.indexes[layer] = None
            return 0, 0

    def changed(self, seq: Sequence, final: bool) -> Iterator[tuple[int, bytes, IndexRef]]:
        """Yield indexes to store: those trained anew, those that have grown, with `final` all that differ."""
        for layer, keeper in enumerate(seq._indexes):
            index, (builds, rows) = keeper.index, seq._saved.marks[layer]
            if index is None or index.n_rows == 0:
                continue
            is_there = seq._saved.indexes[layer] is not None and builds == keeper.n_builds
            if is_there and (index.n_rows == rows or (not final and index.n_rows < rows * (1 + 1 / GROWTH))):
                continue
            data = encode_index(keeper, self._builder, layer)
            if data is not None:
                kind = self._builder.config.index.kind
                yield layer, data, IndexRef(b"", 0, kind, version_of(index), 1, index.first_row, index.stop_row)


def mark(seq: Sequence, layer: int) -> tuple[int, int]:
    """Say what a table's index is: trainings done, rows covered."""
    keeper = seq._indexes[layer]
    return keeper.n_builds, keeper.index.n_rows if keeper.index is not None else 0
