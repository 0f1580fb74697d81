"""A store whose index is of one kind, asked the way a decode step asks it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvstore import IndexConfig, RopeSpec
from kvstore.index.base import Index
from tests.builders import SCHEMA, append, cut, filled, flat_config, make_query, make_rows

N_ROWS = 300


def attends_through(kind: str, **options: Any) -> Index:
    """Attend and ask for top rows with an index of this kind, append, fork, truncate; return the index.

    A budget that covers every row must give dense attention, and what the plan says it reads must name the kind.
    """
    schema = dataclasses.replace(SCHEMA, rope=(RopeSpec.from_theta(1e4, SCHEMA.head_dim),) * 2, fingerprint=kind)
    settings = IndexConfig(kind, options, min_rows=24, append_rows=8, over_fetch=2.0)
    _, seq, _ = filled(schema, flat_config(index=settings), N_ROWS)
    q = make_query(schema, 1)
    dense = seq.attend(0, q, budget=None)
    np.testing.assert_allclose(seq.attend(0, q, budget=N_ROWS), dense, rtol=1e-4, atol=1e-5)
    assert np.isfinite(np.asarray(seq.attend(0, q))).all()
    assert kind in str(seq.explain(0, q))
    found = seq.topk(0, 1, q[2], 5)
    assert len(found) == 5
    assert not found.exact
    append(seq, cut(make_rows(schema, 40, seed=9), 0, 40))
    child = seq.fork("what-if")
    child.truncate(N_ROWS - 20)
    np.testing.assert_allclose(seq.attend(0, q), seq.attend(0, q))
    for index in (child._indexes[0].index, seq._indexes[0].index):
        assert index is not None
        index._check()
    index = seq._indexes[0].index
    assert index is not None
    return index
