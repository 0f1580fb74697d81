"""Opens copies of a spill damaged in every way: `python -m tests.storage.damage_child FOLDER MODE`.

In a process of its own: LMDB alone would die of a truncated file (SIGBUS). Prints a JSON object with how often which
error came, and how often all was well ("whole") or records were missed ("missed"). It fails on bytes never written.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.storage.builders import content, opaque

N_RECORDS, SIZES, PAGE = 24, (60, 1500, 9000, 70_000), 4096
SETTINGS = SpillSettings(8 * MIB)
RECORDS = [opaque(i, SIZES[i % len(SIZES)]) for i in range(N_RECORDS)]


def fill(folder: Path) -> Path:
    """Write a spill with small and large records, and pages that were freed; return its data file."""
    with LmdbTier(folder, SETTINGS) as tier:
        for batch in range(4):
            tier.put_many([*RECORDS[batch::4], opaque(1000 + batch, 20_000)])
            tier.flush()
        tier.delete_many(opaque(1000 + batch).key for batch in range(3))
        tier.delete_many([opaque(1003).key])
    return folder / "spill-000001.mdb"


def truncated(data: bytes) -> Iterator[bytes]:
    """At every page boundary, then at 100 random places."""
    chance = random.Random(3)
    for n in [*range(0, len(data), PAGE), *(chance.randrange(len(data)) for _ in range(100))]:
        yield data[:n]


def flipped(data: bytes) -> Iterator[bytes]:
    """Bits of both meta pages, of the head of every page, of inner pages everywhere, and of payloads."""
    yield from flips(data, every=10)


def flipped_everywhere(data: bytes) -> Iterator[bytes]:
    """The same in many more places."""
    yield from flips(data, every=1)


def flips(data: bytes, every: int) -> Iterator[bytes]:
    chance = random.Random(4)
    places = [*range(200), *range(PAGE, PAGE + 200)]
    for page in range(2, len(data) // PAGE):
        start = page * PAGE
        flags = int.from_bytes(data[start + 10 : start + 12], "little")
        inner = flags & 3 and int.from_bytes(data[start : start + 8], "little") == page
        places += [start + at for at in (range(0, PAGE, 7) if inner else (0, 8, 10, 12, 16, 100, 2000))]
    for at in chance.sample(places, len(places) // every):
        yield data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def torn(data: bytes) -> Iterator[bytes]:
    """Pages that a disk lost, or brought back from elsewhere."""
    chance, n = random.Random(5), len(data) // PAGE
    for _ in range(300):
        at, other = PAGE * chance.randrange(n), PAGE * chance.randrange(n)
        page = chance.choice([bytes(PAGE), data[other : other + PAGE], chance.randbytes(PAGE)])
        yield data[:at] + page + data[at + PAGE :]


MODES = {"truncated": truncated, "flipped": flipped, "flipped everywhere": flipped_everywhere, "torn": torn}


def outcome(folder: Path) -> str:
    """Read everything; raises `AssertionError` for wrong bytes."""
    result = "whole"
    try:
        with LmdbTier(folder, SETTINGS) as tier:
            for record in RECORDS:
                try:
                    [found] = tier.get_many([record.key])
                except KVStoreError:
                    result = "one bad record"
                    continue
                assert found is None or content(found) == content(record), "bytes that were never written"
                if found is None and result == "whole":
                    result = "missed"
            list(tier.iterate())
    except KVStoreError as error:
        return type(error).__name__
    return result


def main(folder: Path, mode: str) -> None:
    data = fill(folder / "sound").read_bytes()
    found: Counter[str] = Counter()
    place = folder / "damaged"
    place.mkdir()
    for damaged in MODES[mode](data):
        for name in os.listdir(place):
            (place / name).unlink()
        (place / "spill-000001.mdb").write_bytes(damaged)
        found[outcome(place)] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
