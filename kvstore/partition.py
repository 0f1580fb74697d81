"""Which KV heads or layers of a model belong to which of several ranks."""

from __future__ import annotations

from kvstore.errors import ConfigError


def check_rank(rank: int, world: int) -> None:
    """Raise `ConfigError` unless world is at least 1 and rank one of 0 ... world - 1."""
    for name, value in (("world", world), ("rank", rank)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} must be an integer, not {value!r}")
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank must be one of 0 ... world - 1 and world at least 1, not rank {rank} of {world}")


def equal_share(what: str, n: int, rank: int, world: int) -> slice:
    """Return the rank's share of n things in equal shares; raises `ConfigError` where there are none."""
    check_rank(rank, world)
    if n % world:
        fits = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise ConfigError(f"{n} {what} cannot be shared evenly by {world} ranks; a world of {fits} fits")
    size = n // world
    return slice(rank * size, (rank + 1) * size)


def near_equal_range(what: str, n: int, rank: int, world: int) -> range:
    """Return the rank's run of n things; runs differ by one at most, the first ones are the longer ones.

    Raises `ConfigError` when there are fewer things than ranks.
    """
    check_rank(rank, world)
    if world > n:
        raise ConfigError(f"{n} {what} are too few for {world} ranks; use at most {n}")
    size, longer = divmod(n, world)
    start = rank * size + min(rank, longer)
    return range(start, start + size + (rank < longer))
