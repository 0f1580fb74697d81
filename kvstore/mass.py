"""How much of the full softmax the rows that attention read hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.attention import Attended
from kvstore.explain import Measured
from kvstore.planner import Plan
from kvstore.topk import AnyRows, exact_scores


def measure(table: AnyRows, plan: Plan, attended: Attended, q: npt.NDArray[np.float32], scale: float) -> Measured:
    """Compare what one sequence's attention read with a full exact scan; q float32 [n_kv_heads, group, head_dim].

    O(n_rows): for `explain` and for tests, never for a decode step.
    """
    rows = np.broadcast_to(np.arange(plan.first, plan.n_rows), (len(q), plan.n_rows - plan.first))
    scores = scale * exact_scores(table, rows, q).astype(np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    chosen = attended.chosen[0, :, : plan.n_selected]
    middle = weights[:, :, plan.sinks_stop - plan.first : plan.tail_start - plan.first].sum(axis=-1)
    places = np.broadcast_to(np.maximum(chosen - plan.first, 0)[:, None], (*q.shape[:2], plan.n_selected))
    caught_sum = np.where(chosen[:, None] >= 0, np.take_along_axis(weights, places, -1), 0.0).sum(axis=-1)
    share = np.divide(caught_sum, middle, out=np.ones_like(middle), where=middle > 0)
    return Measured(
        search_ms=1e3 * attended.search_s,
        attend_ms=1e3 * attended.attend_s,
        mass=float((1.0 - middle + caught_sum).mean()),
        middle_mass=float(share.mean()),
        chosen=chosen,
    )
