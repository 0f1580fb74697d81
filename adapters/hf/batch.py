"""The rows of a batch in the store, which grow by one step a forward pass."""

from __future__ import annotations

from typing import Any

import torch

from kvstore import KVStore, Sequence
from kvstore.adapters.hf.group import SequenceGroup
from kvstore.adapters.hf.layer_clock import LayerClock
from kvstore.adapters.hf.padding import left_padding
from kvstore.adapters.hf.positions import StepPositions
from kvstore.budget import Budget, check_budget
from kvstore.config import ADAPTIVE
from kvstore.errors import SchemaMismatchError
from kvstore.planner import DENSE, plan_attention

_CLOSED, _OPEN, _COMPLETE = "closed", "open", "complete"


class Batch:
    """One sequence of a store a batch row, and the step that a forward pass is to all of them.

    A step is open from the first layer's rows on and complete with the last layer's. A complete step commits at the
    next call that needs it committed, and so before any rows follow; an open one that a forward pass left behind
    (an exception in a layer) is taken back instead. `len(batch)` counts committed and complete rows.

    Attributes:
        sequences: one a batch row; none before the first forward pass.
        budget: of every sequence.
        exact_dense: whether a decode step whose budget covers all rows goes to the model's own dense attention.
        n_before, n_new: rows before the last step, and rows of it.
    """

    def __init__(self, group: SequenceGroup, *, budget: Budget, exact_dense: bool) -> None:
        self.sequences: list[Sequence] = group.sequences
        self.budget = budget
        self.exact_dense = exact_dense
        self.n_before = self.n_new = 0
        self._group = group
        self._step = _CLOSED
        self._n_rows = len(self.sequences[0]) if self.sequences else 0
        self._first_rows: list[int] = [sequence.first_row for sequence in self.sequences]
        self._positions = StepPositions()
        self._clock = LayerClock()
        self._step_positions: list[torch.Tensor] | None = None
        self._selects: bool | None = None  # whether the store answers this step's queries under the mask below
        self._mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return self._n_rows + self.n_new if self._step is _COMPLETE else self._n_rows

    @property
    def store(self) -> KVStore:
        """The store that holds the rows."""
        return self._group.store

    def begin(self, n_batch: int, n_new: int, kwargs: dict[str, Any] | None) -> None:
        """Open a step of n_new rows; kwargs are those of the attention call, where the model hands them over.

        Raises `SchemaMismatchError` when the batch holds the rows of another number of sequences.
        """
        self.settle()
        if len(self.sequences) != n_batch:
            self._resize(n_batch)
        self.n_before, self.n_new = self._n_rows, n_new
        self._selects = self._mask = None
        self._step_positions = self._positions.begin(kwargs, n_batch, n_new)
        prompt = self.n_before == 0 and n_new > 1
        self._clock.begin(prompt and self.store.config.index.iterations == ADAPTIVE)
        self._step = _OPEN
        for sequence in self.sequences:
            sequence.begin_step()

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append the step's rows of one layer: [n_batch, n_kv_heads, n_new, head_dim or value_dim], any device."""
        if not keys.is_cpu:
            keys, values = keys.cpu(), values.cpu()
        self._clock.arrived(layer)
        self.store.append(layer, self.sequences, keys, values, self._step_positions if layer == 0 else None)
        self._clock.stored()

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        """Tell the indexes what a prompt's queries are like, [n_batch, n_q_heads, n_new, head_dim], if they ask."""
        if not self.store.indexing.wants_queries or self._step is _CLOSED:
            return
        for sequence, first_row, row in zip(self.sequences, self._first_rows, queries.unbind(), strict=True):
            sequence.observe_queries(layer, row[:, max(0, first_row - self.n_before) :].detach().cpu())

    def complete(self) -> None:
        """Say that every layer has appended."""
        self._step = _COMPLETE

    def finish(self) -> None:
        """Commit a complete step."""
        if self._step is not _COMPLETE:
            return
        layer_s = self._clock.seconds()
        if layer_s is not None:  # before the commit, which builds the indexes
            self.store.iterations.observed(self.n_new, layer_s / len(self.sequences))
        try:
            for sequence in self.sequences:
                sequence.commit_step()
        except BaseException:
            self._roll_back()  # all sequences of a batch stay of one length
            raise
        self._step = _CLOSED
        self._n_rows += self.n_new
        self._positions.commit()

    def settle(self) -> None:
        """Commit a complete step; take an incomplete one, which its forward pass has left behind, back."""
        self.finish()
        if self._step is _OPEN:
            self._roll_back()

    def enter(self, mask: torch.Tensor | None) -> None:
        """Learn at the first layer's attention, from a prompt's mask, how the batch is padded at the left."""
        if self.n_before == 0 and self._step is not _CLOSED:
            padding = None if mask is None else left_padding(mask, len(self.sequences))
            self._first_rows = padding or [0] * len(self.sequences)
            for sequence, row in zip(self.sequences, self._first_rows, strict=True):
                sequence.first_row = row

    def selects(self, mask: torch.Tensor | None) -> bool:
        """Whether the store can answer this step's queries under this mask; worked out once a step and mask."""
        if self._selects is None or mask is not self._mask:
            self._mask, self._selects = mask, self._can_select(mask)
        return self._selects

    def attend(self, layer: int, queries: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of one token a batch row: [n_batch, n_q_heads, head_dim] -> [n_batch, n_q_heads, value_dim]."""
        if queries.is_cpu:
            return self._group.store.attend(layer, self.sequences, queries, scale=scale)
        return self._group.store.attend(layer, self.sequences, queries.cpu(), scale=scale).to(queries.device)

    def whole(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows of a layer, [n_batch, n_kv_heads, n_before + n_new, dim] each, given those of this step."""
        n = self.n_before
        if keys.shape[2] == n + self.n_new:  # the store was empty, or the rows before are in there already
            return keys, values
        whole_keys, whole_values = (x.new_empty(*x.shape[:2], n + self.n_new, x.shape[3]) for x in (keys, values))
        for row, sequence in enumerate(self.sequences):
            whole_keys[row, :, :n], whole_values[row, :, :n] = sequence.read(layer, 0, n)
        whole_keys[:, :, n:], whole_values[:, :, n:] = keys, values
        return whole_keys, whole_values

    def truncate(self, n_rows: int) -> None:
        """Forget the rows from n_rows on."""
        self.settle()
        if n_rows < self._n_rows:
            for sequence in self.sequences:
                sequence.truncate(n_rows)
            self._n_rows = n_rows
            self._positions.forget()

    def clear(self) -> None:
        """Forget all rows and the size of the batch; the budget stays."""
        self.settle()
        self._group.clear()
        self._n_rows = self.n_before = self.n_new = 0
        self._first_rows = []

    def set_budget(self, budget: Budget) -> None:
        """Set the budget of every sequence, now and later; raises `ConfigError`."""
        check_budget(budget)
        for sequence in self.sequences:
            sequence.budget = budget
        self.budget, self._selects = budget, None

    def select(self, indices: list[int]) -> None:
        """Make batch row i what batch row indices[i] is; does nothing while the batch is empty."""
        self.settle()
        if self._n_rows:
            self._group.select(indices)
            self._positions.select(indices)
            self._first_rows = [self._first_rows[i] for i in indices]

    def fork(self) -> Batch:
        """Return a batch of the same committed rows in the same store; each goes on by itself."""
        self.settle()
        twin = Batch(self._group.fork(), budget=self.budget, exact_dense=self.exact_dense)
        twin.n_before, twin.n_new, twin._n_rows = self.n_before, self.n_new, self._n_rows
        twin._first_rows, twin._positions = self._first_rows[:], self._positions.copy()
        return twin

    def _resize(self, n_batch: int) -> None:
        if self._n_rows:
            raise SchemaMismatchError(
                f"the cache holds {self._n_rows} rows of {len(self.sequences)} sequences, the model sent a batch of "
                f"{n_batch}; use reset(), batch_repeat_interleave() or batch_select_indices()"
            )
        self._group.create(n_batch, self.budget)
        self._first_rows = [0] * n_batch
        self._positions.start(n_batch)

    def _roll_back(self) -> None:
        self._step = _CLOSED
        for sequence in self.sequences:
            sequence.abort_step()
            if len(sequence) > self._n_rows:
                sequence.truncate(self._n_rows)

    def _can_select(self, mask: torch.Tensor | None) -> bool:
        if self.n_before == 0:  # a prompt of one token
            return False
        if mask is None:
            hidden: list[int] | None = [0] * len(self.sequences)
        else:
            hidden = left_padding(mask, len(self.sequences))
        if hidden != self._first_rows or (mask is not None and mask.shape[-1] != self.n_before + self.n_new):
            return False
        return not (self.exact_dense and self._covers_all())

    def _covers_all(self) -> bool:
        n, config = self.n_before + self.n_new, self.store.config
        if callable(self.budget):
            return False  # each layer and head has its own: the store plans them
        return all(plan_attention(config, self.budget, row, n, None).method == DENSE for row in self._first_rows)
