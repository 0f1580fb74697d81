"""What differs between the transformers versions that the adapter serves (5.4 and later)."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

NAME = "kvstore"  # of the attention function, as `attn_implementation` has it
HANDOVER = "kvstore_layer"
# Classes of layers that hold nothing; older versions have none and make no entry for such layers.
NO_CACHE: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
_CROP_COUNTS_REMOVED = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


def cache_argument(model: Any) -> str:
    """Name of the argument of `model.forward` and `model.generate` that takes a cache.

    transformers 5.24 renamed `past_key_values` to `cache` and warns about the old name.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def kept_rows(n_rows: int, argument: int) -> int:
    """Return how many of n_rows `crop(argument)` keeps, in the words of any version.

    0 and less is minus the rows to remove, as it is since 5.15; more is the rows to keep, as it was before.
    """
    return min(n_rows, argument) if argument > 0 else max(0, n_rows + argument)


def crop_argument(n_rows: int, target: int) -> int:
    """Return what `crop` of a layer of this version wants, to cut n_rows down to target (0 <= target <= n_rows)."""
    return target - n_rows if _CROP_COUNTS_REMOVED else target


def hand_over(layer: Any, key: Any, value: Any, kwargs: dict[str, Any] | None) -> None:
    """Let the attention function find the layer that returned key and value.

    Since 5.24 `update` is given the very dict that becomes the attention function's keyword arguments. Before that the
    tensors are all that goes from one to the other, and they always are for layers that borrow another layer's keys.
    """
    if kwargs is not None:
        kwargs[HANDOVER] = layer
    key._kvstore_layer = value._kvstore_layer = layer


def take_over(key: Any, value: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return the layer that `hand_over` left, or None, and whether key and value are as it returned them.

    Removes the layer from kwargs.
    """
    marked = getattr(key, "_kvstore_layer", None)
    layer = kwargs.pop(HANDOVER, marked)
    return layer, marked is layer and getattr(value, "_kvstore_layer", None) is layer
