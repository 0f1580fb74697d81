"""Settings of the product-quantization index, checked."""

from __future__ import annotations

from kvstore.errors import ConfigError
from kvstore.index.rope import RopeSpec
from kvstore.index.weighting import QUERIES

RAW, ROPE = "raw", "rope"


def check_space(space: str, rope: RopeSpec | None, pairs: bool, iterations: int, sample: int) -> None:
    """Raise `ConfigError` unless space, pairs and the sizes of a training fit each other."""
    if space not in (RAW, ROPE):
        raise ConfigError(f"space must be 'raw' or 'rope', not {space!r}")
    if space == ROPE and (rope is None or not pairs):
        raise ConfigError("space='rope' needs rope=RopeSpec(...) and pairs=True; or use space='raw'")
    if iterations < 1 or sample < 1:
        raise ConfigError(f"iterations and sample_per_centroid must be at least 1, not {iterations}, {sample}")


def checked_scan_pairs(scan_pairs: int | None, space: str, m: int, head_dim: int) -> int:
    """Return how many RoPE pairs a scan reads, all when None is given; raise `ConfigError` for what cannot be."""
    every = head_dim // 2
    if scan_pairs is None:
        return every
    if space != ROPE:
        raise ConfigError("scan_pairs needs space='rope'; in the raw space a scan reads no pairs")
    if not m <= scan_pairs <= every or scan_pairs % m:
        raise ConfigError(f"scan_pairs must be a multiple of m = {m}, at most {every}, not {scan_pairs}")
    return scan_pairs


def checked_weighting(weighting: str | None) -> str | None:
    """Return the weighting; raise `ConfigError` when there is none of that name."""
    if weighting not in (None, QUERIES):
        raise ConfigError(f"weighting must be {QUERIES!r} or None, not {weighting!r}")
    return weighting
