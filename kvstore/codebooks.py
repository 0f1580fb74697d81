"""The catalog of codebooks that belong to the model: one a layer, shared by all sequences."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, SchemaMismatchError
from kvstore.index.base import Index
from kvstore.index.codebook import Codebook
from kvstore.index.weighting import Weighting
from kvstore.schema import Schema
from kvstore.tensor_file import Arrays, read_tensors, write_tensors

FORMAT = "kvstore codebooks"
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class ModelCodebook:
    """One layer's codebook as the catalog keeps it; never changed, replaced by one of a higher version.

    Attributes:
        codebook: the centroids.
        error: float32 [n_kv_heads], mean squared error to expect of keys like those it was trained on.
        version: 1, 2, ...: how often this layer has been trained.
        rows: rows it was trained on.
    """

    codebook: Codebook
    error: npt.NDArray[np.float32]
    version: int
    rows: int


def has_codebook(index: Index) -> bool:
    """Whether a kind of index has a codebook that can be shared: `codebook=`, `.codebook`, `.layout`, `.errors()`."""
    return hasattr(type(index), "codebook") and hasattr(type(index), "errors")


class Codebooks:
    """Layer -> `ModelCodebook`. Sequences that use an older version keep it, so codes never change their meaning.

    `save` and `load` move a catalog between stores of the same model and the same settings of the index.
    """

    def __init__(self, schema: Schema, empty_index: Callable[[int, Codebook | None], Index]) -> None:
        self._schema = schema
        self._empty_index = empty_index  # of a layer; raises SchemaMismatchError when the codebook does not fit
        self._of_layer: dict[int, ModelCodebook] = {}

    def __len__(self) -> int:
        return len(self._of_layer)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._of_layer))

    def get(self, layer: int) -> ModelCodebook | None:
        """Return the layer's codebook, or None before one was trained."""
        return self._of_layer.get(layer)

    def put(self, layer: int, codebook: Codebook, error: npt.NDArray[np.float32], rows: int) -> ModelCodebook:
        """Make a codebook the layer's next version."""
        before = self._of_layer.get(layer)
        found = ModelCodebook(codebook, error, before.version + 1 if before is not None else 1, rows)
        self._of_layer[layer] = found
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all centroids."""
        return sum(entry.codebook.nbytes for entry in self._of_layer.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the catalog as a safetensors file, whole or not at all."""
        arrays: Arrays = {}
        for layer in self:
            entry = self._of_layer[layer]
            arrays[f"layer.{layer}.centroids"] = entry.codebook.centroids
            arrays[f"layer.{layer}.error"] = entry.error
            if (weighting := entry.codebook.weighting) is not None:
                arrays[f"layer.{layer}.forth"], arrays[f"layer.{layer}.back"] = weighting.forth, weighting.back
        versions = {str(layer): [self._of_layer[layer].version, self._of_layer[layer].rows] for layer in self}
        metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "layers": json.dumps(versions)}
        write_tensors(path, arrays, metadata | self.identity())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over a saved catalog; layers that it does not hold stay.

        Raises `SchemaMismatchError`, with nothing changed, for a file that is damaged, of another format version, or
        of another model or other settings of the index.
        """
        arrays, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise SchemaMismatchError(f"{path} holds tensors but no codebooks")
        expected = {"format_version": str(FORMAT_VERSION), **self.identity()}
        for name, value in expected.items():
            if metadata.get(name) != value:
                raise SchemaMismatchError(f"{path} has {name} {metadata.get(name)}, this store {value}; train again")
        try:
            versions = {int(layer): (int(v), int(n)) for layer, (v, n) in json.loads(metadata["layers"]).items()}
            found = {layer: self._entry(arrays, layer, *versions[layer]) for layer in versions}
        except SchemaMismatchError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise SchemaMismatchError(f"{path} is damaged: {error}") from error
        self._of_layer.update(found)

    def identity(self) -> dict[str, str]:
        """Say which keys these codebooks code, and how: text by name; codes fit where it is equal."""
        s = self._schema
        shape = {"n_layers": s.n_layers, "n_kv_heads": s.n_kv_heads, "head_dim": s.head_dim}
        rope = [asdict(spec) if spec is not None else None for spec in s.rope]
        layouts = [self._layout(layer) for layer in range(s.n_layers)]
        return {
            "schema": json.dumps(shape, sort_keys=True),
            "model": s.fingerprint,
            "rope": _digest(rope),
            "layout": " ".join(sorted({layout["name"] for layout in layouts})) + " " + _digest(layouts),
        }

    def _layout(self, layer: int) -> dict[str, Any]:
        index = self._empty_index(layer, None)
        if not has_codebook(index):
            raise ConfigError(f"an index of kind {index.kind!r} has no codebook")
        layout, space = asdict(index.layout), getattr(index, "space", "")  # type: ignore[attr-defined]
        return {"name": f"{index.kind}-{layout['m']}x{layout['bits']}-{space}", **layout}

    def _entry(self, arrays: Arrays, layer: int, version: int, rows: int) -> ModelCodebook:
        s = self._schema
        error = arrays[f"layer.{layer}.error"]
        weighting = None
        if f"layer.{layer}.forth" in arrays:
            weighting = Weighting(arrays[f"layer.{layer}.forth"], arrays[f"layer.{layer}.back"])
        codebook = Codebook(arrays[f"layer.{layer}.centroids"], weighting)
        if not 0 <= layer < s.n_layers or version < 1 or error.shape != (s.n_kv_heads,):
            raise ValueError(f"layer {layer}, version {version}, errors {error.shape}")
        if len(codebook.laid) != s.n_kv_heads or not np.isfinite(error).all():
            raise ValueError(f"the codebook of layer {layer} has {len(codebook.laid)} KV heads, or no finite error")
        self._empty_index(layer, codebook)
        return ModelCodebook(codebook, error, version, rows)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
