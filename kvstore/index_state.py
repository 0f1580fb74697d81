"""An index as bytes and back, so that a store that is opened again need not train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.codebooks import has_codebook
from kvstore.drift import Drift
from kvstore.errors import CorruptStoreError, KVStoreError
from kvstore.index.codebook import Codebook
from kvstore.index.runs import Runs
from kvstore.index.weighting import Weighting
from kvstore.index_builder import Built, IndexBuilder
from kvstore.storage.arrays import decode_arrays, encode_arrays

if TYPE_CHECKING:
    from kvstore.table_index import TableIndex

VERSION = 1


def encode_index(keeper: TableIndex, builder: IndexBuilder, layer: int) -> bytes | None:
    """Return a table's index as bytes; None for kinds that can only be built again.

    A codebook that is the model's is named by its version, others are written whole.
    """
    index: Any = keeper.index
    if index is None or not has_codebook(index) or not hasattr(index, "add_codes"):
        return None
    model = builder.codebooks.get(layer)
    shared = model is not None and model.codebook is index.codebook
    runs = Runs()
    runs.append(index.positions)
    arrays = {"codes": np.asarray(index.codes), "offsets": runs.offsets, "positions": runs.positions}
    notes: dict[str, Any] = {
        "rows": index.n_rows,
        "model_version": model.version if shared and model is not None else 0,
        "trained_rows": keeper.trained_rows,
    }
    if not shared:
        arrays["centroids"] = index.codebook.centroids
        if (weighting := index.codebook.weighting) is not None:
            arrays |= {"forth": weighting.forth, "back": weighting.back}
    if keeper.drift is not None:
        arrays["error"] = keeper.drift.reference
    return encode_arrays(arrays, notes)


def decode_index(data: bytes, builder: IndexBuilder, layer: int, first_row: int) -> Built:
    """Return the index that bytes stand for; raises `CorruptStoreError` when they are damaged or do not fit."""
    arrays, notes = decode_arrays(data)
    try:
        runs = Runs()
        runs.offsets, runs.positions, runs.n_rows = arrays["offsets"], arrays["positions"], int(notes["rows"] or 0)
        _check_runs(runs)
        codebook, note = _codebook(arrays, int(notes["model_version"] or 0), builder, layer)
        index: Any = builder.empty(layer, first_row, codebook=codebook)
        index.add_codes(arrays["codes"], runs.at(np.arange(runs.n_rows)))
        if index.n_rows != runs.n_rows:
            raise ValueError(f"codes of {index.n_rows} rows, positions of {runs.n_rows}")
        drift = Drift(arrays["error"].astype(np.float32)) if "error" in arrays else None
        return Built(index, False, int(notes["trained_rows"] or 0), drift, note)
    except (KVStoreError, KeyError, ValueError, TypeError) as error:
        raise CorruptStoreError(
            f"the stored index of layer {layer} is damaged or of other settings: {error}"
        ) from error


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
