"""Where the time of a decode step goes: the store's attention, its rows, its adapter, or the model itself.

Blocks that are measured so are no others' business: tokens a second are told by blocks in which nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.engines import StoreEngine
    from kvstore.timeline import Timeline

FORWARD, ADAPTER, CALLED, APPENDED, COMMITTED = "forward", "adapter", "store.attend", "store.append", "seq.commit_step"
CACHE_CALLS = ("update", "get_seq_length", "get_mask_sizes", "get_query_offset")
"""What models call of a cache; a version of transformers may lack one of them."""
LEAST_S = -1e-9
"""What rounding may leave of a part that took no time."""


@dataclass(frozen=True)
class Split:
    """Seconds of one step, a mean over the steps of a block; `step_s` is the sum of the others.

    Attributes:
        step_s: the whole forward pass of a token.
        search_s: finding candidates. fetch_s: rerank, fetch and softmax over the rows picked. plan_s: what else
            `store.attend` does: checks, plans, conversion.
        append_s, commit_s: `KVStore.append` of all layers and `Sequence.commit_step`, their checks included.
        other_s: what else runs in the adapter: its cache's methods and its attention function.
        model_s: what is left, that is the model, and of transformers what surrounds it.
        n_layers: of the store.
        n_events: clocked in a step. event_s: what clocking one takes; it is in the figures above.
    """

    step_s: float
    search_s: float
    fetch_s: float
    plan_s: float
    append_s: float
    commit_s: float
    other_s: float
    model_s: float
    n_layers: int
    n_events: float
    event_s: float

    @property
    def outside_s(self) -> float:
        """Seconds of the engine outside attention: everything of it but search, rerank, fetch and softmax."""
        return self.plan_s + self.append_s + self.commit_s + self.other_s

    @property
    def measuring_s(self) -> float:
        """Seconds of a step that went into clocking it."""
        return self.n_events * self.event_s


class Meter:
    """Decodes blocks of tokens and takes their time apart.

    Attributes:
        splits: one a block.
    """

    def __init__(self, engine: StoreEngine, tokens: Sequence[torch.Tensor]) -> None:
        """Each of tokens is int64 [1]."""
        self.splits: list[Split] = []
        self._engine = engine
        self._tokens = tokens
        self._forward: Callable[[torch.Tensor], object] = engine.forward

    def run(self) -> None:
        """Decode a block; call it inside `recording`."""
        for token in self._tokens:
            self._forward(token)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of one block, inside that in which attention asks the store."""
        store = self._engine.cache.store
        event_s = seconds_of_event()
        with store.timeline() as timeline, _told_of(self._engine, timeline):
            self._forward = _told(timeline, FORWARD, self._engine.forward)
            yield
        self._forward = self._engine.forward
        self.splits.append(split_of(timeline, len(self._tokens), store.schema.n_layers, event_s))

    def median(self) -> Split:
        """Return the block whose steps took the median time (the lower one of two), so that its parts add up."""
        return sorted(self.splits, key=lambda split: split.step_s)[(len(self.splits) - 1) // 2]


def split_of(timeline: Timeline, n_steps: int, n_layers: int, event_s: float) -> Split:
    """Take a timeline of n_steps apart; raises `RuntimeError` where a part is longer than what should contain it."""
    step, ours, called, attend, search, append, commit = (
        timeline.seconds(name) / n_steps for name in (FORWARD, ADAPTER, CALLED, "attend", "search", APPENDED, COMMITTED)
    )
    parts = {
        "search": search,
        "fetch": attend - search,
        "plan": called - attend,
        "append": append,
        "commit": commit,
        "other": ours - called - append - commit,
        "model": step - ours,
    }
    for name, seconds in parts.items():
        if seconds < LEAST_S:
            raise RuntimeError(f"the parts of a step do not add up: {name} would take {seconds:.3g} s of {step:.3g} s")
    spent = {f"{name}_s": max(0.0, seconds) for name, seconds in parts.items()}
    return Split(step_s=step, n_layers=n_layers, n_events=len(timeline.events) / n_steps, event_s=event_s, **spent)


def seconds_of_event(repeats: int = 500) -> float:
    """Return what clocking one call takes, seconds: the least of five trials, for a busy machine only adds to it."""
    from kvstore.timeline import Timeline

    def nothing() -> None:
        """Take no time."""

    def trial(call: Callable[[], object]) -> float:
        """Seconds of one call."""
        started = perf_counter()
        for _ in range(repeats):
            call()
        return (perf_counter() - started) / repeats

    told = min(trial(_told(Timeline(), "event", nothing)) for _ in range(5))
    return max(0.0, told - min(trial(nothing) for _ in range(5)))


@contextmanager
def _told_of(engine: StoreEngine, timeline: Timeline) -> Iterator[None]:
    """Tell a timeline, inside a `with` block, of the calls between model, adapter and store."""
    from transformers import AttentionInterface

    from kvstore.adapters.hf.attention import register, store_attention
    from kvstore.adapters.hf.compat import NAME

    cache = engine.cache
    calls = [(cache, name, ADAPTER) for name in CACHE_CALLS if hasattr(cache, name)]
    calls += [(cache.store, "attend", CALLED), (cache.store, "append", APPENDED)]
    calls += [(sequence, "commit_step", COMMITTED) for sequence in cache.sequences]
    with ExitStack() as undo:
        for owner, method, name in calls:
            setattr(owner, method, _told(timeline, name, getattr(owner, method)))
            undo.callback(delattr, owner, method)  # the class's own again
        undo.callback(register)
        AttentionInterface.register(NAME, _told(timeline, ADAPTER, store_attention))
        yield


def _told(timeline: Timeline, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return call, such that each call is an event of that name."""
    from kvstore.timeline import now_us

    def told(*args: Any, **kwargs: Any) -> Any:
        """Call it; an event ends with a result only, for an exception ends the run."""
        began_us = now_us()
        result = call(*args, **kwargs)
        timeline.add(name, began_us, now_us(), None, "calls")
        return result

    return told
