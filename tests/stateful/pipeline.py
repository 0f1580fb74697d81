"""A store whose work in the background is late and fails, beside lists of tokens and dense attention in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstore import IndexConfig, KVStore, MaintenanceError
from tests import oracles
from tests.builders import SCHEMA, flat_config, make_query, make_rows, same_bits
from tests.stateful.unreliable import Late, LostError, Unsteady

POOL = make_rows(SCHEMA, 400, seed=8)  # token t has the keys and values of row t
LAYERS = range(SCHEMA.n_layers)
SINKS, WINDOW, MIN_SELECTED, DENSE_ROWS = 2, 8, 8, 32  # of `flat_config`
OPTIONS = {"pq": {"m": 2, "bits": 3}, "page": {"page_tokens": 8}, "sq4": {}}


@dataclass
class Told:
    """What a sequence was told: tokens of committed rows, padding, and of an open step its tokens and next layer."""

    tokens: list[int]
    padding: int
    step: list[int] | None = None
    layer: int = 0

    def rows(self, layer: int) -> list[int]:
        """Tokens of a layer's rows, those of the open step included."""
        return self.tokens + (self.step if self.step is not None and layer < self.layer else [])

    def visible(self, layer: int) -> list[int]:
        """Tokens of the rows that a query of this layer may read."""
        return self.rows(layer)[self.padding :]


class Pipeline:
    """The store under test and what it was told; each call does the same to both and compares."""

    schema, pool = SCHEMA, POOL

    def __init__(self, kind="pq", workers="late", seed=0, **settings):
        index = IndexConfig(kind, OPTIONS[kind], min_rows=24, append_rows=8, codebook_rows=40, **settings)
        self.store = self.open(flat_config(index=index))
        self.worker = Late() if workers == "late" else Unsteady(settings.get("threads", 1), seed)
        self.store.maintenance.executor = self.worker
        self.told: dict[str, Told] = {}
        self.heard: list[BaseException | None] = []
        self.made = 0
        self.create(0)

    def open(self, config):
        """The store, empty."""
        return KVStore(self.schema, config)

    @property
    def names(self):
        """Newest first."""
        return sorted(self.told, reverse=True)

    def _new_name(self):
        self.made += 1
        return f"s{self.made:03}"

    def surfacing(self, call):
        """Make a call that may raise what has failed in the background: each failure once."""
        while True:
            try:
                return call()
            except MaintenanceError as error:
                self.heard.append(error.__cause__)

    # ---- what changes the store ----

    def create(self, padding):
        """A new sequence; the oldest makes room."""
        if len(self.told) > 3:
            self.drop(self.names[-1])
        name = self._new_name()
        self.store.create(name, first_row=padding)
        self.told[name] = Told([], padding)

    def append(self, name, start, n):
        """The next layer of the step, which is opened for the first."""
        told, seq = self.told[name], self.store[name]
        if told.step is None:
            self.surfacing(seq.begin_step)
            told.step, told.layer = [(start + i) % 400 for i in range(n)], 0
        if told.layer < len(LAYERS):
            seq.append(told.layer, *(rows[:, told.step] for rows in self.pool[told.layer]))
            told.layer += 1

    def commit(self, name):
        """Append what is missing of an open step, and commit it."""
        told = self.told[name]
        while told.step is not None and told.layer < len(LAYERS):
            self.append(name, 0, 1)
        if told.step is not None:
            self.store[name].commit_step()
            told.tokens, told.step = told.tokens + told.step, None

    def step(self, name, start, n):
        """A whole step, or the rest of the one that is open."""
        self.append(name, start, n)
        self.commit(name)

    def turn(self, name, start, n, n_answer):
        """An input in one step, and an answer row by row."""
        self.step(name, start, n)
        for i in range(n_answer):
            self.step(name, start + n + i, 1)

    def abort(self, name):
        """Take an open step back."""
        self.store[name].abort_step()
        self.told[name].step = None

    def truncate(self, name, share):
        """Forget the last rows."""
        told = self.told[name]
        if told.step is None:
            keep = round(share * len(told.tokens))
            self.store[name].truncate(keep)
            del told.tokens[keep:]

    def fork(self, name, share):
        """A sequence with the first rows of another."""
        told = self.told[name]
        if told.step is None and len(self.told) < 5:
            keep = round(share * len(told.tokens))
            twin = self._new_name()
            self.store[name].fork(twin, keep)
            self.told[twin] = Told(told.tokens[:keep], told.padding)

    def drop(self, name):
        """Forget a sequence, also within a step."""
        self.store.drop(name)
        del self.told[name]
        if not self.told:
            self.create(0)

    def reindex(self, name, layer, background):
        """Index again, now or beside everything else."""
        if self.told[name].step is None:
            self.store[name].reindex(layer, background=background)

    def run(self, which, n_steps):
        """Let some work go on to later check points."""
        self.worker.advance(which, n_steps)

    def fail(self, which):
        """Let some work fail where it stands."""
        if self.worker.open:
            self.worker.fail(self.worker.open[which % len(self.worker.open)])

    def refuse(self):
        """The next work finds no thread."""
        self.worker.refusals = isinstance(self.worker, Late)

    def wait(self):
        """Wait for all work over committed rows, and take its results."""
        self.surfacing(self.store.wait)
        settled = [seq for name, seq in self.store._sequences.items() if self.told[name].step is None]
        assert not any(keeper.rebuilding for seq in settled for keeper in seq._indexes)

    # ---- what asks it ----

    def attend(self, name, layer, seed, budget):
        """Attention over the rows that the plan names, which are those that the planner promises."""
        told, seq, q = self.told[name], self.store[name], make_query(self.schema, seed)
        tokens = told.visible(layer)
        if not tokens:
            return
        while True:  # threads may bring an index between two calls
            explained = self.surfacing(lambda: seq.explain(layer, q, analyze=True, budget=budget))
            out = self.surfacing(lambda: seq.attend(layer, q, budget=budget))
            if explained.plan == self.surfacing(lambda: seq.explain(layer, q, budget=budget)).plan:
                break
        keys, values = (rows[:, tokens] for rows in self.pool[layer])
        read = _rows_read(explained.plan, explained.measured.chosen, len(tokens), budget)
        expected = oracles.attention(q, keys, values, self.schema.scale, None if budget is None else read)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
        if explained.plan.method == "flat":
            _assert_best(explained.plan, explained.measured.chosen, keys, q, self.schema.scale)

    def together(self, layer, seed):
        """A batch of all sequences gives each what it gets alone, bit for bit."""
        names = [name for name in self.names if self.told[name].visible(layer)]
        q = (
            torch.stack([make_query(self.schema, seed + i) for i in range(len(names))])
            if names
            else torch.empty(0, self.schema.n_q_heads, self.schema.head_dim)
        )
        for name in names:
            self.surfacing(lambda name=name: self.store[name].attend(layer, q[0]))
        sequences = [self.store[name] for name in names]
        if isinstance(self.worker, Late) or self.store.config.index.wait:  # else an index may come in between
            found = self.surfacing(lambda: self.store.attend(layer, sequences, q))
            for i, seq in enumerate(sequences):
                assert same_bits(found[i], self.surfacing(lambda seq=seq, i=i: seq.attend(layer, q[i])))

    def check(self):
        """The books balance, failures were raised once, and every row is the one that was given."""
        self.store._check()
        assert all(isinstance(error, LostError) for error in self.heard)
        assert len(self.heard) == len(set(map(id, self.heard))), "a failure was raised twice"
        assert sorted(self.store) == self.names[::-1]
        for name, told in self.told.items():
            seq = self.store[name]
            assert (len(seq), seq.step_open) == (len(told.tokens), told.step is not None)
            for layer in LAYERS:
                tokens = told.rows(layer)
                for stored, given in zip(seq.read(layer), self.pool[layer], strict=True):
                    assert same_bits(stored, given[:, tokens])

    def finish(self):
        """Let all end; every failure that nobody gave up was raised once, and the store can be used."""
        for name in self.names:
            self.commit(name)
        self.worker.refusals = 0
        self.wait()
        for name in self.names:
            self.step(name, 11, 1)
        self.wait()
        wanted = [error for job, error in self.worker.faults if not job._cancelled.is_set()]
        assert set(wanted) <= set(self.heard), "a failure was never raised"
        for name in self.names:
            self.store[name].reindex()
            self.step(name, 12, 9)
            self.wait()
            for layer in LAYERS:
                covered, last = self.store[name]._indexes[layer].covered, len(self.told[name].tokens) - WINDOW
                assert covered is None or covered[1] == covered[0] or 0 <= last - covered[1] < 8
                for budget in (None, 24):
                    self.attend(name, layer, 5, budget)


def _rows_read(plan, chosen, length, budget):
    """Rows that a plan reads, a list a KV head, not counting padding; asserts what the planner promises of them."""
    first = plan.first
    assert plan.n_rows - first == length
    if plan.method == "dense":
        assert (plan.sinks_stop, plan.tail_start) == (plan.n_rows, plan.n_rows)
    else:
        assert budget is not None
        assert length > DENSE_ROWS
        assert plan.sinks_stop == first + SINKS
        assert plan.tail_start <= plan.n_rows - WINDOW
        allowed = budget if isinstance(budget, int) else budget * length + 1
        kept = length - plan.n_middle
        assert plan.n_attended <= max(allowed, kept + MIN_SELECTED)
    read = []
    for rows in chosen:
        assert all(plan.sinks_stop <= row < plan.tail_start for row in rows)
        all_rows = np.r_[first : plan.sinks_stop, rows, plan.tail_start : plan.n_rows] - first
        assert len(all_rows) == len(set(all_rows.tolist())) == plan.n_attended
        read.append(all_rows)
    return read


def _assert_best(plan, chosen, keys, q, scale):
    """Without an index the rows chosen are the best ones."""
    start, stop = plan.sinks_stop - plan.first, plan.tail_start - plan.first
    for head, rows in enumerate(chosen):
        scores = oracles.group_scores(q[2 * head : 2 * head + 2], keys[head, start:stop], scale, "sum_softmax")
        oracles.assert_best_rows(rows - plan.sinks_stop, scores, plan.n_selected)
