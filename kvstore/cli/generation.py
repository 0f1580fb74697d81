"""Greedy generation with a store, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvstore.adapters.hf import StoreCache, cache_argument, open_store, use_store_attention
from kvstore.adapters.hf.kept_text import kept_text
from kvstore.adapters.model_files import LoadedModel
from kvstore.adapters.quiet import quiet_transformers
from kvstore.budget import Budget
from kvstore.cli.stream import TextStream
from kvstore.config import StoreConfig


@dataclass(frozen=True)
class Generation:
    """A generated text and how it came about.

    Attributes:
        model, text: name of the model, and what it wrote.
        budget: rows that a step was allowed to read.
        n_prompt_tokens, n_new_tokens: lengths. n_stored_tokens: of the prompt, those that were in the store already.
        first_token_s: seconds from the prompt to the first new token.
        tokens_per_s: new tokens a second after the first; 0 for a single one.
        rows_share: rows that the decode steps read, as a share of those there were.
        index_bytes_per_key, key_bytes: size of one head's key in the index (0: no index), and in the model.
    """

    model: str
    text: str
    budget: Budget
    n_prompt_tokens: int
    n_new_tokens: int
    first_token_s: float
    tokens_per_s: float
    rows_share: float
    index_bytes_per_key: float
    key_bytes: int
    n_stored_tokens: int = 0

    def _stored(self) -> str:
        return f", {self.n_stored_tokens} of them stored before" if self.n_stored_tokens else ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        index = f"index {self.index_bytes_per_key:.1f} of {self.key_bytes} bytes a key"
        return (
            f"{self.n_new_tokens} tokens, {self.tokens_per_s:.1f} a second; first after {self.first_token_s:.1f} s "
            f"({self.n_prompt_tokens} of prompt{self._stored()}); steps read {self.rows_share:.1%} of the rows; "
            f"{index if self.index_bytes_per_key else 'no index'}"
        )


def generate_text(
    loaded: LoadedModel,
    prompt: list[int],
    config: StoreConfig,
    n_new: int,
    emit: Callable[[str], None],
    path: Path | None = None,
    timeline: Path | None = None,
) -> Generation:
    """Continue a prompt by at most n_new tokens, greedily; `emit` is given the text as it comes.

    With `path` what is read is kept in a store there, and what is there already is not read again. `timeline` is the
    file for what ran when. Raises
    `UnsupportedModelError` when the store cannot serve the model, and what opening the store raises.
    """
    stream = TextStream(loaded.tokenizer, emit)
    started = perf_counter()
    with use_store_attention(loaded.model), quiet_transformers():
        if path is not None:
            with open_store(path, loaded.model, config) as store, kept_text(loaded.model, store, prompt) as kept:
                kept.cache.set_budget(config.budget)
                with _recorded(kept.cache, timeline):
                    _generate(loaded.model, prompt, n_new, kept.cache, stream)
                kept.tokens = [*prompt, *stream.tokens]
                found = _result(loaded, kept.cache, config.budget, len(prompt), stream, started)
                return replace(found, n_stored_tokens=kept.n_stored)
        with closing(StoreCache(loaded.model, config=config)) as cache:
            with _recorded(cache, timeline):
                _generate(loaded.model, prompt, n_new, cache, stream)
            return _result(loaded, cache, config.budget, len(prompt), stream, started)


@contextmanager
def _recorded(cache: StoreCache, file: Path | None) -> Iterator[None]:
    """Record what the cache's store does inside the context, and write it to a file, if there is one."""
    if file is None or cache.store is None:
        yield
        return
    with cache.store.timeline() as timeline:
        yield
    if file.suffix == ".png":
        timeline.plot(file)
    else:
        timeline.save(file)


@torch.inference_mode()
def _generate(model: Any, prompt: list[int], n_new: int, cache: StoreCache, stream: TextStream) -> None:
    tokens = torch.tensor([prompt], device=model.device)
    model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=n_new,
        do_sample=False,
        streamer=stream,
        **{cache_argument(model): cache},
    )


def _result(
    loaded: LoadedModel, cache: StoreCache, budget: Budget, n_prompt: int, stream: TextStream, started: float
) -> Generation:
    stats = None if cache.store is None else cache.store.stats()
    n_new, times = len(stream.tokens), stream.times
    available = stats.counters.rows_available if stats else 0
    return Generation(
        model=loaded.name,
        text=loaded.tokenizer.decode(stream.tokens, skip_special_tokens=True),
        budget=budget,
        n_prompt_tokens=n_prompt,
        n_new_tokens=n_new,
        first_token_s=times[0] - started,
        tokens_per_s=(n_new - 1) / (times[-1] - times[0]) if n_new > 1 else 0.0,
        rows_share=stats.counters.rows_attended / available if stats and available else 1.0,
        index_bytes_per_key=stats.index_bytes_per_key if stats else 0.0,
        key_bytes=cache.store.schema.key_bytes if cache.store else 0,
    )
