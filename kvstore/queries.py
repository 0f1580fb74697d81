"""The top-k part of a store's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kvstore.config import REDUCTIONS, StoreConfig
from kvstore.errors import InvalidQueryError
from kvstore.locking import StoreLock, locked
from kvstore.paged_rows import open_rows
from kvstore.schema import Schema
from kvstore.stats import Counters
from kvstore.topk import AnyRows, Query, TopK, find_top_k, nothing_found
from kvstore.topk_modes import find_mass, find_range
from kvstore.validate import (
    as_group,
    check_beta,
    check_head,
    check_k,
    check_layer,
    check_mass,
    check_query,
    query_array,
)

if TYPE_CHECKING:
    from kvstore.sequence import Sequence
    from kvstore.spill_pool import SpillPool


class Queries:
    """What `KVStore` answers about single rows; mixed into it, since these names are its own."""

    _lock: StoreLock
    schema: Schema
    config: StoreConfig
    counters: Counters
    _spill_pool: SpillPool | None

    if TYPE_CHECKING:

        def _find(self, sequence: Sequence | str | None) -> Sequence: ...

    @locked
    def topk(
        self,
        layer: int,
        head: int,
        q: torch.Tensor,
        k: int | None = None,
        *,
        mass: float | None = None,
        sequence: Sequence | str | None = None,
        rows: str = "all",
        reduce: str | None = None,
        exact: bool = False,
    ) -> TopK:
        """Return the k committed rows with the largest scores, best first; ties go to the lower position.

        q is [head_dim], scored by inner product, or [group, head_dim], the query heads of KV head `head`, scored by
        `reduce` (the config's: the sum over the group of the softmax over the rows asked for). `rows="middle"` leaves
        out sinks and window. `exact=True` passes by the index. k above the number of rows returns them all.
        `mass` in (0, 1] in place of k asks for the fewest rows that hold this share of the softmax mass; their scores
        are their shares, summed over the group. `sequence` may be left out when the store holds just one.
        """
        check_head(self.schema, head)
        group = as_group(self.schema, q)
        every_head = group.expand(self.schema.n_kv_heads, -1, -1)
        if mass is None:
            found = self.topk_heads(layer, every_head, k, sequence=sequence, rows=rows, reduce=reduce, exact=exact)
            return TopK(found.positions[head], found.scores[head], found.exact)
        check_mass(mass, k, reduce)
        seq, query = self._query(layer, every_head, 1, sequence, rows, reduce, exact)
        if query.k == 0:
            return nothing_found()
        with self._open_table(seq, layer) as table:
            return find_mass(table, seq._indexes[layer], self.config, query, head, mass)

    @locked
    def topk_heads(
        self,
        layer: int,
        q: torch.Tensor,
        k: int | None,
        *,
        sequence: Sequence | str | None = None,
        rows: str = "all",
        reduce: str | None = None,
        exact: bool = False,
    ) -> TopK:
        """Like `topk` for all KV heads at once: q [n_kv_heads, group, head_dim] -> positions [n_kv_heads, k]."""
        seq, query = self._query(layer, q, check_k(k), sequence, rows, reduce, exact)
        if query.k == 0:
            return nothing_found(self.schema.n_kv_heads)
        with self._open_table(seq, layer) as table:
            return find_top_k(table, seq._indexes[layer], self.config, query)

    @locked
    def range(
        self,
        layer: int,
        head: int,
        q: torch.Tensor,
        beta: float,
        *,
        sequence: Sequence | str | None = None,
        rows: str = "all",
        exact: bool = False,
    ) -> TopK:
        """Return all committed rows whose inner product with q [head_dim] is within beta of the largest, best first.

        The query of AlayaDB (arXiv 2504.10326): as many rows as matter, however many those are.
        """
        check_head(self.schema, head)
        check_query(q, (self.schema.head_dim,))
        check_beta(beta)
        every_head = q[None, None].expand(self.schema.n_kv_heads, 1, -1)
        seq, query = self._query(layer, every_head, 1, sequence, rows, None, exact)
        if query.k == 0:
            return nothing_found()
        with self._open_table(seq, layer) as table:
            return find_range(table, seq._indexes[layer], self.config, query, head, float(beta))

    @contextmanager
    def _open_table(self, seq: Sequence, layer: int) -> Iterator[AnyRows]:
        with open_rows([seq._tables[layer]], self._spill_pool) as (table,):
            yield table

    def _query(
        self,
        layer: int,
        q: torch.Tensor,
        k: int,
        sequence: Sequence | str | None,
        rows: str,
        reduce: str | None,
        exact: bool,
    ) -> tuple[Sequence, Query]:
        """Check a top-k query; its k is cut to the rows there are, so 0 means that there are none."""
        check_layer(self.schema, layer)
        single = isinstance(q, torch.Tensor) and q.ndim == 3 and q.shape[1] == 1
        check_query(q, (self.schema.n_kv_heads, 1 if single else self.schema.group, self.schema.head_dim))
        reduce = self.config.reduce if reduce is None else reduce
        if reduce not in REDUCTIONS:
            raise InvalidQueryError(f"reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
        seq = self._find(sequence)
        if not exact:
            seq._indexes[layer].ready()
        start, stop = self._row_range(seq, rows)
        k = max(0, min(k, stop - start))
        query = Query(query_array(q, q.shape), k, start, stop, self.schema.scale, reduce, exact)
        self.counters.topks += 1
        return seq, query

    def _row_range(self, seq: Sequence, rows: str) -> tuple[int, int]:
        if rows == "all":
            return seq.first_row, len(seq)
        if rows == "middle":
            return seq.first_row + self.config.sinks, len(seq) - self.config.window
        raise InvalidQueryError(f"rows must be 'all' or 'middle', not {rows!r}")
