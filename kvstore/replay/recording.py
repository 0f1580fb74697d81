"""Recording which blocks a store's attention reads."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.replay.trace import BlockTrace, BlockTraceError, IntArray

if TYPE_CHECKING:
    from kvstore.attention import Attended
    from kvstore.planner import Plan
    from kvstore.sequence import Sequence
    from kvstore.store import KVStore


class BlockRecorder:
    """The blocks that one sequence's decode steps have read so far; made by `record_blocks`."""

    def __init__(self, n_layers: int, block_tokens: int, sequence: str | None) -> None:
        self._n_layers = n_layers
        self._block_tokens = block_tokens
        self._sequence = sequence
        self._n_rows = 0
        self._step: list[IntArray] = []
        self._batches: list[IntArray] = []

    @property
    def n_steps(self) -> int:
        """Whole steps recorded."""
        return len(self._batches) // self._n_layers

    def see(self, layer: int, sequence: str, rows: IntArray, n_rows: int) -> None:
        """Take the rows that a layer has selected, int64 [n], of all KV heads, from a table of n_rows.

        The first sequence seen is the one that is followed, unless one was named. A step counts once its last layer
        was seen; one that an exception has cut short does not.
        """
        if self._sequence is None:
            self._sequence = sequence
        if sequence != self._sequence:
            return
        if layer == 0:
            self._step = []
        if layer != len(self._step):
            return
        self._step.append(rows // self._block_tokens)
        if len(self._step) == self._n_layers:
            self._batches += self._step
            self._n_rows = max(self._n_rows, n_rows)

    def trace(self, model: str = "") -> BlockTrace:
        """Return what was recorded; `model` is its name. Raises `BlockTraceError` when no step was."""
        if not self._batches:
            raise BlockTraceError("no decode step was recorded: let the model write a token inside record_blocks")
        found = [np.unique(batch, return_counts=True) for batch in self._batches]
        return BlockTrace.from_batches(
            np.tile(np.arange(self._n_layers), self.n_steps),
            [blocks for blocks, _ in found],
            [counts.astype(np.int64) for _, counts in found],
            n_layers=self._n_layers,
            n_blocks=-(-self._n_rows // self._block_tokens),
            block_tokens=self._block_tokens,
            model=model,
        )


@contextmanager
def record_blocks(
    store: KVStore, sequence: str | None = None, *, block_tokens: int | None = None
) -> Iterator[BlockRecorder]:
    """Record which blocks the attention of one sequence reads inside a `with` block: the one named, or the first.

    Recorded are the rows selected from the middle: sinks and tail are read by every step, and need no pool. Rows are
    counted in blocks of `block_tokens`, the schema's if left out. Attention answers as ever.

    >>> from kvstore import KVStore, Schema
    >>> with record_blocks(KVStore(Schema(n_layers=1, n_q_heads=1, n_kv_heads=1, head_dim=4))) as recorder:
    ...     recorder.n_steps
    0
    """
    size = store.schema.block_tokens if block_tokens is None else block_tokens
    if size < 1:
        raise BlockTraceError(f"blocks of {size} rows cannot be; give block_tokens of at least 1")
    recorder = BlockRecorder(store.schema.n_layers, size, sequence)
    own = vars(store)
    former, run = own.get("_run"), store._run  # there is a former one inside another `record_blocks`

    def observed(layer: int, sequences: SequenceABC[Sequence], plans: list[Plan], *rest: Any) -> Attended:
        attended = run(layer, sequences, plans, *rest)
        for seq, plan, chosen in zip(sequences, plans, attended.chosen, strict=True):
            recorder.see(layer, seq.name, chosen[chosen >= 0], plan.n_rows)
        return attended

    own["_run"] = observed  # of this store alone
    try:
        yield recorder
    finally:
        del own["_run"]
        if former is not None:
            own["_run"] = former
