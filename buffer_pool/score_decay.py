"""Score-decay: evict what has caught the least attention, where old attention counts less."""

from __future__ import annotations

from kvstore.buffer_pool.ageing import AgedSum
from kvstore.buffer_pool.policy import FloatArray


class ScoreDecay(AgedSum):
    """Aged sum of the weights of all uses: attention mass, or the number of selected rows that a block held."""

    def _amounts(self, weights: FloatArray) -> FloatArray:
        return weights
