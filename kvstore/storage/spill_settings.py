"""Settings of a spill."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError

MIB = 1 << 20
DURABILITIES = ("process", "power")
WHEN_FULL = ("block", "raise")
PAGE_BYTES = 4096


@dataclass(frozen=True)
class SpillSettings:
    """How records are kept on disk.

    Attributes:
        spill_bytes: largest size of the data file. A sixteenth of it is kept free, so that a full spill can still be
            deleted from; records count with their last page whole.
        durability: what a written batch survives: "process", a killed process (the system's cache is not waited for);
            "power", a loss of power too (every commit waits for the disk).
        queue_bytes: batches that may wait to be written, in memory; as much is kept to be used again.
        commit_bytes: batches that are written in one transaction.
        when_full: of a full queue: writers "block", or `SpillFullError` is "raise"d.
        max_readers: threads of all processes that may read at the same time.
    """

    spill_bytes: int
    durability: str = "process"
    queue_bytes: int = 32 * MIB
    commit_bytes: int = 8 * MIB
    when_full: str = "block"
    max_readers: int = 126

    def __post_init__(self) -> None:
        for name, least in (("spill_bytes", MIB), ("queue_bytes", 1), ("commit_bytes", 1), ("max_readers", 1)):
            size = getattr(self, name)
            if type(size) is not int or size < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, not {size!r}")
        if self.durability not in DURABILITIES:
            raise ConfigError(f"durability must be one of {', '.join(DURABILITIES)}, not {self.durability!r}")
        if self.when_full not in WHEN_FULL:
            raise ConfigError(f"when_full must be one of {', '.join(WHEN_FULL)}, not {self.when_full!r}")

    @property
    def map_bytes(self) -> int:
        """Size of the memory map, set once: spill_bytes in whole pages."""
        return -(-self.spill_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def capacity_bytes(self) -> int:
        """Room for records, in whole pages."""
        return self.map_bytes - max(MIB // 4, self.map_bytes // 16)
