"""exp for float32 without a call, so that a loop over scores vectorises."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.index.jit import STRICT, jit
from kvstore.index.loads import times_power_of_two

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits, so its product with a small whole number is exact
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to a whole number
_LOWEST = np.float32(-87.0)  # below, exp leaves the normal float32
_HIGHEST = np.float32(88.0)  # above, 2**n does

# Minimax polynomial for (exp(r) - 1 - r) / r**2 on |r| <= log(2) / 2: Cephes `expf` (S. Moshier, netlib).
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)


@jit(fastmath=STRICT)  # reassociation would cancel the rounding constant
def fast_exp(x: Any) -> Any:
    """exp(x) for a float32, relative error below 1e-6; 0 below -87 (also -inf), inf above 88, NaN stays.

    Range reduction x = n log 2 + r with log 2 in two parts, a polynomial in r, n added to the exponent bits.
    """
    zero, one = np.float32(0.0), np.float32(1.0)
    inside = x if x > _LOWEST else _LOWEST
    inside = inside if inside < _HIGHEST else _HIGHEST
    n = (inside * _LOG2_E + _ROUND) - _ROUND
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    y = times_power_of_two(p * (r * r) + r + one, n)
    y = zero if x < _LOWEST else y
    y = np.float32(np.inf) if x > _HIGHEST else y
    return x if x != x else y


@jit(fastmath=STRICT)
def exp_of_negative(x: Any) -> Any:
    """`fast_exp` of a float32 x <= 0, cheaper; NaN stays."""
    inside = x if x > _LOWEST else _LOWEST
    n = (inside * _LOG2_E + _ROUND) - _ROUND
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    y = times_power_of_two(p * (r * r) + r + np.float32(1.0), n)
    y = np.float32(0.0) if x < _LOWEST else y
    return x if x != x else y
