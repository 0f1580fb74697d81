"""An index as bytes and back, so that a store that is opened again need not train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.codebooks import ModelCodebook, has_codebook
from kvstore.drift import Drift
from kvstore.errors import CorruptStoreError, KVStoreError
from kvstore.index.codebook import Codebook
from kvstore.index.runs import Runs
from kvstore.index.segments import SegmentedIndex
from kvstore.index.weighting import Weighting
from kvstore.index_builder import Built, IndexBuilder
from kvstore.storage.arrays import decode_arrays, encode_arrays

if TYPE_CHECKING:
    from kvstore.table_index import TableIndex

VERSION, SEGMENTS_VERSION = 1, 2
VERSIONS = (VERSION, SEGMENTS_VERSION)
MAX_SEGMENTS = 1 << 16


def version_of(index: Any) -> int:
    """Return the version of the bytes of an index: those of several segments are new in version 2."""
    return SEGMENTS_VERSION if isinstance(index, SegmentedIndex) else VERSION


def encode_index(keeper: TableIndex, builder: IndexBuilder, layer: int) -> bytes | None:
    """Return a table's index as bytes; None for kinds that can only be built again.

    A codebook that is the model's is named by its version, others are written whole. Names of what belongs to a segment
    after the first end with its number.
    """
    index: Any = keeper.index
    segments = index.segments if isinstance(index, SegmentedIndex) else [index]
    if any(part is None or not has_codebook(part) or not hasattr(part, "add_codes") for part in segments):
        return None
    arrays: dict[str, Any] = {}
    notes: dict[str, Any] = {"trained_rows": keeper.trained_rows}
    for i, segment in enumerate(segments):
        found, said = _encode_segment(segment, builder.codebooks.get(layer))
        arrays |= {_name(name, i): value for name, value in found.items()}
        notes |= {_name(name, i): value for name, value in said.items()}
    if version_of(index) == SEGMENTS_VERSION:
        notes["segments"] = len(segments)
    if keeper.drift is not None:
        arrays["error"] = keeper.drift.reference
    return encode_arrays(arrays, notes)


def decode_index(data: bytes, builder: IndexBuilder, layer: int, first_row: int) -> Built:
    """Return the index that bytes stand for; raises `CorruptStoreError` when they are damaged or do not fit."""
    arrays, notes = decode_arrays(data)
    try:
        n_segments = int(notes.get("segments") or 0)
        if not 0 <= n_segments <= MAX_SEGMENTS:
            raise ValueError(f"{n_segments} segments")
        segments: list[Any] = []
        for i in range(max(1, n_segments)):
            at = segments[-1].stop_row if segments else first_row
            index, note = _decode_segment(arrays, notes, i, builder, layer, at)
            segments.append(index)
        whole = SegmentedIndex(segments, workspace=builder.workspace) if n_segments else segments[0]
        drift = Drift(arrays["error"].astype(np.float32)) if "error" in arrays else None
        return Built(whole, False, int(notes["trained_rows"] or 0), drift, note)
    except (KVStoreError, KeyError, ValueError, TypeError) as error:
        raise CorruptStoreError(
            f"the stored index of layer {layer} is damaged or of other settings: {error}"
        ) from error


def _name(name: str, segment: int) -> str:
    return name if segment == 0 else f"{name} {segment}"


def _encode_segment(index: Any, model: ModelCodebook | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arrays and notes of an index with one codebook."""
    shared = model is not None and model.codebook is index.codebook
    runs = Runs()
    runs.append(index.positions)
    arrays = {"codes": np.asarray(index.codes), "offsets": runs.offsets, "positions": runs.positions}
    if not shared:
        arrays["centroids"] = index.codebook.centroids
        if (weighting := index.codebook.weighting) is not None:
            arrays |= {"forth": weighting.forth, "back": weighting.back}
    return arrays, {"rows": index.n_rows, "model_version": model.version if shared and model is not None else 0}


def _decode_segment(
    arrays: dict[str, Any], notes: dict[str, Any], i: int, builder: IndexBuilder, layer: int, first_row: int
) -> tuple[Any, dict[str, Any]]:
    """Return a segment and what is to be said of it."""
    own = {name: arrays[_name(name, i)] for name in _ARRAYS if _name(name, i) in arrays}
    runs = Runs()
    runs.offsets, runs.positions = own["offsets"], own["positions"]
    runs.n_rows = int(notes[_name("rows", i)] or 0)
    _check_runs(runs)
    codebook, note = _codebook(own, int(notes[_name("model_version", i)] or 0), builder, layer)
    index: Any = builder.empty(layer, first_row, codebook=codebook)
    index.add_codes(own["codes"], runs.at(np.arange(runs.n_rows)))
    if index.n_rows != runs.n_rows:
        raise ValueError(f"codes of {index.n_rows} rows, positions of {runs.n_rows}")
    return index, note


_ARRAYS = ("codes", "offsets", "positions", "centroids", "forth", "back")


def _codebook(
    arrays: dict[str, Any], version: int, builder: IndexBuilder, layer: int
) -> tuple[Codebook, dict[str, Any]]:
    if version:
        model = builder.codebooks.get(layer)
        if model is None or model.version != version:
            raise ValueError(f"it uses version {version} of the model's codebook, which is not there")
        return model.codebook, {"codebook": f"model v{version}"}
    weighting = Weighting(arrays["forth"], arrays["back"]) if "forth" in arrays else None
    return Codebook(arrays["centroids"], weighting), {"codebook": "sequence"}


def _check_runs(runs: Runs) -> None:
    if len(runs.offsets) != len(runs.positions) or bool(len(runs.offsets)) != (runs.n_rows > 0):
        raise ValueError(f"{len(runs.offsets)} runs of positions for {runs.n_rows} rows")
    inside = (np.diff(runs.offsets) > 0).all() and (runs.n_rows == 0 or runs.offsets[0] == 0)
    if not inside or (runs.n_rows and runs.offsets[-1] >= runs.n_rows):
        raise ValueError("runs of positions that are not in order")
