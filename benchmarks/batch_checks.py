"""Whether each sequence of a batch gets what it gets alone; nothing is timed before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.batch_engines import BatchEngine, Prompt
from benchmarks.engines import STORE
from benchmarks.speed import MAX_LOGIT_DIFFERENCE, WrongResultError
from benchmarks.timing import Tell

if TYPE_CHECKING:
    import torch

    from kvstore import StoreConfig
    from kvstore.budget import Budget


@dataclass(frozen=True)
class Alone:
    """Greedy tokens of one prompt by itself in the store, int64 [n] each, with all rows and with the budget."""

    full: torch.Tensor
    budget: torch.Tensor


def run_alone(
    model: Any, prompts: Sequence[Prompt], budget: Budget, n_tokens: int, config: StoreConfig | None, tell: Tell
) -> list[Alone]:
    """Decode each prompt by itself."""
    found = []
    for number, prompt in enumerate(prompts):
        tell(f"alone, {number + 1} of {len(prompts)}")
        engine = BatchEngine(STORE, model, config)
        try:
            with engine.active():
                logits = engine.prompt([prompt])
            full = engine.greedy(logits, n_tokens)[0]
            engine.set_budget(budget)
            found.append(Alone(full, engine.greedy(logits, n_tokens)[0]))
        finally:
            engine.close()
    return found


@dataclass(frozen=True)
class Checked:
    """What the checks of one batch found.

    Attributes:
        logit_difference: largest one to `DynamicCache` for the same padded batch, all rows.
        same_tokens: share of the sequences whose greedy tokens are those of its single run, with all rows (1, or the
            run stops), and same_with_budget: of the tokens, with the budget (which may differ: see `check_attention`).
        results: attention results that were compared bit for bit with those of one sequence alone.
    """

    logit_difference: float
    same_tokens: float
    same_with_budget: float
    results: int


def check_batch(
    peer: BatchEngine,
    store: BatchEngine,
    logits: tuple[torch.Tensor, torch.Tensor],
    alone: Sequence[Alone],
    budget: Budget,
) -> Checked:
    """Compare the store's batch with the peer's and with single runs, from the logits (peer, store) of the prompts on.

    Leaves both caches as they were. Raises `WrongResultError`.
    """
    import torch

    wanted = torch.stack([one.full for one in alone])
    difference = _logit_difference(peer, store, logits, wanted)
    store.set_budget(None)
    got = store.greedy(logits[1], wanted.shape[1])
    same = (got == wanted).all(1)
    if not same.all():
        raise WrongResultError(f"sequences {(~same).nonzero()[:, 0].tolist()} decode other tokens than alone")
    store.set_budget(budget)
    results = check_attention(store, logits[1].argmax(-1))
    selective = store.greedy(logits[1], wanted.shape[1]) == torch.stack([one.budget for one in alone])
    return Checked(difference, float(same.float().mean()), float(selective.float().mean()), results)


def _logit_difference(
    peer: BatchEngine, store: BatchEngine, logits: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor
) -> float:
    """Largest difference over these tokens, int64 [n_batch, n]; raises `WrongResultError` when it is too large."""
    found = [logits]
    store.set_budget(None)
    for column in tokens.unbind(1):
        with peer.active():
            theirs = peer.forward(column)
        with store.active():
            found.append((theirs, store.forward(column)))
    peer.back(tokens.shape[1])
    store.back(tokens.shape[1])
    difference = max(float((ours - theirs).abs().max()) for theirs, ours in found)
    if not difference <= MAX_LOGIT_DIFFERENCE:
        raise WrongResultError(f"logits of the batch differ from those of {peer.name} by {difference:.2g}")
    return difference


def check_attention(store: BatchEngine, tokens: torch.Tensor) -> int:
    """Run one step; compare each sequence's attention, layer by layer, with what `attend` gives it alone, bit for bit.

    Tokens with a budget cannot be held to those of a single run: torch rounds the matrix products of another batch
    size otherwise, so queries and rows differ in their last bits, and where two rows are about as good the other
    one may be picked. Given the same rows and queries, though, the store must give each sequence the same bits in any
    company. Returns the number of results compared; raises `WrongResultError`.
    """
    counts = [0, 0]
    with _compared(store.cache.store, counts), store.active():
        store.forward(tokens)
    store.back(1)
    if counts[0] != counts[1] or not counts[0]:
        raise WrongResultError(f"{counts[0] - counts[1]} of {counts[0]} attention results differ from those alone")
    return counts[0]


@contextmanager
def _compared(kvstore: Any, counts: list[int]) -> Iterator[None]:
    """Count in counts, inside a `with` block, results of `attend` and those that one sequence alone gets too."""
    import torch

    attend = kvstore.attend

    def checked(layer: int, sequences: Sequence[Any], q: torch.Tensor, **options: Any) -> torch.Tensor:
        out: torch.Tensor = attend(layer, sequences, q, **options)
        for row, sequence in enumerate(sequences):
            counts[0] += 1
            counts[1] += torch.equal(out[row], attend(layer, [sequence], q[row : row + 1], **options)[0])
        return out

    kvstore.attend = checked
    try:
        yield
    finally:
        del kvstore.attend  # the class's own again
