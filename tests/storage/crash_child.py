"""A process that writes to a spill until it is killed: `python -m tests.storage.crash_child FOLDER [POINT N]`.

Batch i writes SLOTS records and the number i, and says so before ("begin i") and after ("done i") it is written. With
a point it kills itself when it gets there for the N-th time; without, somebody else does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.record import Record
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.storage.builders import ALICE, noise

SLOTS = 4
COUNTER = RecordKey(Kind.CATALOG, ALICE, 0)
SETTINGS = SpillSettings(16 * MIB)


def expected(i: int) -> list[Record]:
    """Everything that the spill holds after batch i."""
    keys = [RecordKey(Kind.TOKENS, ALICE, 0, 0, slot) for slot in range(SLOTS)]
    records = [Record(key, noise(3000 + 997 * s, i * SLOTS + s)) for s, key in enumerate(keys)]
    return [Record(COUNTER, str(i).encode()), *records]


def suicide(point: str, n: int):
    """A hook that kills the process at a point."""
    left = [n]

    def hook(reached: str) -> None:
        if reached == point:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def main(folder: Path, point: str = "", n: str = "0") -> None:
    tier = LmdbTier(folder, SETTINGS, hook=suicide(point, int(n)))
    [last] = tier.get_many([COUNTER])
    i = int(bytes(last.payload)) if last else 0
    while True:
        i += 1
        say(f"begin {i}")
        tier.put_many(expected(i))
        tier.flush()
        say(f"done {i}")
        if i % 5 == 0:
            tier.vacuum()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
