"""The ways to run a model with a cache that are compared: transformers' own, preallocated views, and the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig
    from kvstore.budget import Budget

DYNAMIC = "DynamicCache"
STATIC = "StaticCache"
VIEWS = "preallocated views"
STORE = "store"
DENSE_PEERS = (DYNAMIC, STATIC, VIEWS)


class Engine:
    """A model and one kind of cache, for one sequence; attention is torch's fused one ("sdpa").

    Attributes:
        cache: of transformers' interface, or None before `start`.
        position: of the next token; None where it is the number of rows, as it is unless rows were filled in.
    """

    def __init__(self, name: str, model: Any) -> None:
        from kvstore.adapters.hf import cache_argument

        self.name = name
        self.model = model
        self.cache: Any = None
        self.position: int | None = None
        self._argument = cache_argument(model)

    def start(self, capacity: int) -> None:
        """Begin an empty cache that will hold up to `capacity` tokens."""
        self.close()
        self.cache, self.position = self._new_cache(capacity), None

    def forward(self, ids: torch.Tensor, keep: int = 1) -> torch.Tensor:
        """Append tokens, int64 [n]; return the logits [keep, vocabulary] of the last `keep` of them."""
        import torch

        options: dict[str, Any] = {self._argument: self.cache}
        if self.position is not None:
            options["position_ids"] = torch.arange(self.position, self.position + len(ids))[None]
            self.position += len(ids)
        with torch.no_grad():
            out = self.model(ids[None], use_cache=True, logits_to_keep=keep, **options)
        logits: torch.Tensor = out.logits[0]
        return logits

    def back(self, n_tokens: int) -> None:
        """Forget the newest tokens; a preallocated cache keeps its room."""
        if self.position is not None:
            self.position -= n_tokens
        self._crop(n_tokens)

    def _crop(self, n_tokens: int) -> None:
        """Let the cache forget the newest tokens."""
        from kvstore.adapters.hf.compat import crop_argument

        length = int(self.cache.get_seq_length())
        if n_tokens > 0:
            # StaticCache only counts back: later tokens overwrite the rows, and the mask hides them until then
            self.cache.crop(-n_tokens if self.name == STATIC else crop_argument(length, length - n_tokens))
        if int(self.cache.get_seq_length()) != length - n_tokens:
            raise RuntimeError(f"{self.name}: stepping back {n_tokens} of {length} tokens had no effect")

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which `forward` is called."""
        yield

    def held_bytes(self) -> int:
        """Bytes allocated for keys and values (and an index, where there is one)."""
        tensors = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        return sum(int(tensor.untyped_storage().nbytes()) for tensor in tensors)

    def close(self) -> None:
        """Give the cache's memory back."""
        self.cache = None

    def _new_cache(self, capacity: int) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.name == STATIC:
            return StaticCache(config=self.model.config, max_cache_len=capacity)
        if self.name == VIEWS:
            from benchmarks.views import views_cache

            return views_cache(self.model.config, capacity)
        return DynamicCache(config=self.model.config)


class StoreEngine(Engine):
    """A model and the store; the budget may change between tokens."""

    def __init__(self, model: Any, config: StoreConfig | None = None, name: str = STORE) -> None:
        super().__init__(name, model)
        self._config = config

    def set_budget(self, budget: Budget) -> None:
        """Set the rows that each decoded token attends to; None for all."""
        self.cache.set_budget(budget)

    def _crop(self, n_tokens: int) -> None:
        """Let the cache forget the newest tokens."""
        self.cache.crop(-n_tokens)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which attention asks the store."""
        from kvstore.adapters.hf import use_store_attention

        with use_store_attention(self.model):
            yield

    def held_bytes(self) -> int:
        """Bytes that the heap has reserved, and those of the indexes."""
        stats = self.cache.store.stats()
        return int(stats.heap_reserved_bytes + stats.index_bytes)

    def close(self) -> None:
        """Close the store."""
        if self.cache is not None:
            self.cache.close()
        self.cache = None

    def _new_cache(self, capacity: int) -> Any:
        from kvstore.adapters.hf import StoreCache

        return StoreCache(self.model, budget=None, config=self._config)


def make_engine(name: str, model: Any, config: StoreConfig | None = None) -> Engine:
    """Return the engine of that name; `config` is the store's."""
    if name == STORE:
        return StoreEngine(model, config)
    if name not in DENSE_PEERS:
        raise ValueError(f"no engine is named {name!r}; there are {', '.join((*DENSE_PEERS, STORE))}")
    return Engine(name, model)
