"""LFU with ageing: evict what was used least often, where old uses count less."""

from __future__ import annotations

import numpy as np

from kvstore.buffer_pool.ageing import AgedSum
from kvstore.buffer_pool.policy import FloatArray


class LFU(AgedSum):
    """Aged number of uses; weights count for nothing.

    Without ageing (`half_life=math.inf`) it is the textbook's LFU, whose counts of yesterday's topic never go away.
    """

    def _amounts(self, weights: FloatArray) -> FloatArray:
        return np.ones(len(weights))
