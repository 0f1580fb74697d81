"""A cache of transformers whose full attention layers live in a store."""

from __future__ import annotations

import copy
import os
from dataclasses import fields, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvstore import KVStore, Schema, Sequence, StoreConfig
from kvstore.adapters.hf.attention import register
from kvstore.adapters.hf.batch import Batch
from kvstore.adapters.hf.compat import NO_CACHE, crop_argument, kept_rows
from kvstore.adapters.hf.group import SequenceGroup
from kvstore.adapters.hf.layer import StoreLayer
from kvstore.adapters.hf.schema import same_model, schema_of
from kvstore.adapters.hf.support import check_supported, text_config
from kvstore.budget import Budget, check_budget
from kvstore.errors import ConfigError, SchemaMismatchError, StepError, UnsupportedModelError


class StoreCache(Cache):  # type: ignore[misc]
    """Keys and values of a model's full attention layers, in a `KVStore`.

    Give it to `generate` or to the model as any other cache, inside `use_store_attention(model)`: each decoded token
    then attends to the rows that the budget allows. Prompts are attended densely. Without that context the cache is a
    plain one, and attention dense. Layers with a sliding window or a recurrent state stay as transformers makes them.

    >>> cache = StoreCache(model, budget=0.1)  # doctest: +SKIP
    >>> with use_store_attention(model):  # doctest: +SKIP
    ...     model.generate(**inputs, **{cache_argument(model): cache})

    Attributes:
        store: the store, or None for a model without full attention layers.
        store_layers: number of a layer in the model -> its number in the store.
    """

    is_compileable = False

    def __init__(
        self,
        model_or_config: Any,
        *,
        config: StoreConfig | None = None,
        store: KVStore | None = None,
        name: str | None = None,
        exact_dense: bool = False,
        **settings: Any,
    ) -> None:
        """Make a cache, empty unless `name` is a sequence of the store that has rows.

        Args:
            model_or_config: a causal language model, or its configuration. From a model the cache also takes the
                dtype and the rotary embedding that it really uses.
            config: settings of the cache's own store.
            store: one that others may use too, see `open_store`; it outlives the cache.
            name: of the sequence in it that the cache is: the model goes on from its rows. One batch row then.
            exact_dense: compute decode steps whose budget covers all rows with the model's own dense attention. That
                is slower, and bit for bit what a `DynamicCache` gives; the store's dense attention rounds otherwise.
            **settings: settings of `StoreConfig` by name, in place of those of config: `budget=0.1, window=128`.

        Raises `UnsupportedModelError` when the store cannot serve the model, `ConfigError` for bad settings and
        `SchemaMismatchError` for a store of another model.
        """
        check_supported(model_or_config)
        register()
        if store is not None and (config is not None or settings):
            raise ConfigError("a store that is given has its settings; make it with them, or give no store")
        if name is not None and store is None:
            raise ConfigError("a name means a sequence of a store; give the store too, see open_store")
        config = store.config if store is not None else replace(config or StoreConfig(), **settings)
        self._model_config = text_config(model_or_config)
        layers = self._stock_layers()
        full = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
        self.store: KVStore | None = None
        self.store_layers = {number: index for index, number in enumerate(full)}
        self._batch: Batch | None = None
        self._owns_store = store is None
        if full:
            schema = schema_of(model_or_config, full, weights=store is not None)
            self.store = KVStore(schema, config) if store is None else _checked_store(store, schema)
            group = SequenceGroup(self.store, name=name)
            budget = group.sequences[0].budget if group.sequences else config.budget
            self._batch = Batch(group, budget=budget, exact_dense=exact_dense)
            for number, index in self.store_layers.items():
                layers[number] = StoreLayer(self._batch, index, len(full))
        super().__init__(layers=layers)
        self._mixed = any(not isinstance(layer, (StoreLayer, *NO_CACHE)) for layer in layers)
        if self._mixed and self._batch is not None and len(self._batch):
            raise UnsupportedModelError(
                f"{name!r} has rows, but the model's layers with a sliding window or a state are not stored with them"
            )
        self._last_layer = self._final_layer = max(
            (number for number, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)), default=-1
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys [batch, n_kv_heads, n, head_dim] and values; return what its attention needs.

        Raises `StepError` in a model that also has layers of transformers' own, when the forward pass before this one
        stopped midway: the store takes back what it was given then, those layers cannot.
        """
        if self._mixed:
            if layer_idx <= self._last_layer != self._final_layer:
                raise StepError(
                    f"the forward pass before this one stopped after layer {self._last_layer}, and layers with a "
                    "sliding window or a state keep what it wrote; call reset() and give the cache all tokens again"
                )
            self._last_layer = layer_idx
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def reset(self) -> None:
        """Forget all tokens."""
        if self._batch is not None:
            self._batch.clear()
        for number, fresh in enumerate(self._stock_layers()):  # some versions' own reset keeps length and batch size
            if number not in self.store_layers:
                self.layers[number] = fresh
        self._last_layer = self._final_layer

    @property
    def sequences(self) -> list[Sequence]:
        """The store's sequences, one a batch row, with all rows committed; none before the first forward pass."""
        if self._batch is None:
            return []
        self._batch.finish()
        return list(self._batch.sequences)

    @property
    def rows_suffice(self) -> bool:
        """Whether a model can go on from the rows alone: it has no layers with a sliding window or a state."""
        return not self._mixed

    @property
    def budget(self) -> Budget:
        """Rows that a query attends to; None for all, and for a model without full attention layers."""
        return None if self._batch is None else self._batch.budget

    def set_budget(self, budget: Budget) -> None:
        """Set the budget from the next token on; raises `ConfigError` when it is out of its range."""
        check_budget(budget)
        if self._batch is not None:
            self._batch.set_budget(budget)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove -tokens_to_remove of the newest tokens; a positive number is how many to keep, as it once was."""
        n_rows = self.get_seq_length()
        target = kept_rows(n_rows, int(tokens_to_remove))  # some versions give a tensor
        if self._batch is not None:
            self._batch.truncate(target)
        for number, layer in enumerate(self.layers):
            if n_rows and number not in self.store_layers:
                layer.crop(crop_argument(n_rows, target))

    def close(self) -> None:
        """Give the memory back now; the cache cannot be used any more, nor can its copies, which share the store.

        A store that was given stays open, with all rows committed; its owner closes it.
        """
        if self._batch is not None:
            self._batch.settle()
        if self.store is not None and self._owns_store:
            self.store.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreCache:
        """Return a cache of the same tokens that goes on by itself; rows are forked in the store."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._batch = None if self._batch is None else self._batch.fork()
        twin.layers = [self._copy_layer(layer, twin._batch, memo) for layer in self.layers]
        return twin

    def _stock_layers(self) -> list[Any]:
        return list(DynamicCache(config=self._model_config).layers)

    def _copy_layer(self, layer: Any, batch: Batch | None, memo: dict[int, Any]) -> Any:
        if batch is not None and isinstance(layer, StoreLayer):
            return layer.copy_to(batch)
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):  # copy.deepcopy refuses tensors that are part of a graph
                memo[id(value)] = value.detach().clone()
        return copy.deepcopy(layer, memo)


def open_store(
    path: str | os.PathLike[str], model_or_config: Any, config: StoreConfig | None = None, *, readonly: bool = False
) -> KVStore:
    """Open, or make, the store in a directory for a model's full attention layers; see `KVStore.open`.

    A model of other weights is another model: `SchemaMismatchError`. Raises `UnsupportedModelError` for a model without
    such layers.
    """
    check_supported(model_or_config)
    layers = DynamicCache(config=text_config(model_or_config)).layers
    full = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not full:
        raise UnsupportedModelError("the model has no layers that attend to all tokens; there is nothing to store")
    return KVStore.open(path, schema_of(model_or_config, full, weights=True), config, readonly=readonly)


def _checked_store(store: KVStore, schema: Schema) -> KVStore:
    """Return the store; raises `SchemaMismatchError` when its rows are not those of the schema."""
    for field in fields(Schema):
        ours, theirs = getattr(store.schema, field.name), getattr(schema, field.name)
        is_same = same_model(ours, theirs) if field.name == "fingerprint" else ours == theirs
        if not is_same:
            raise SchemaMismatchError(
                f"{field.name} is {ours!r} in the store, {theirs!r} in the model; use its own store"
            )
    return store
