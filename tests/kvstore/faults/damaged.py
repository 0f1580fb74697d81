"""Opens a store whose files are damaged in every way: `python -m tests.kvstore.faults.damaged FOLDER MODE EVERY`.

In a process of its own, which nothing may end; does one in EVERY damages. Prints a JSON object with how often which
error came, and how often all was well ("whole") or sequences were lost and the others right ("missed", "cut"), or a
record is left that LMDB shows but does not find, so that it cannot be deleted ("unreachable": its key now lies below
the separator of its page), or an error kept it from being mended. It fails on rows that were never given.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from unittest.mock import patch

from kvstore import KVStore, KVStoreError
from kvstore.storage.spill_settings import SpillSettings
from tests.kvstore.faults.workload import SCHEMA, found, perform, run, small, tokens_of

PAGE, HEADER, KEY, CHECKSUM = 4096, 72, 32, 8
CONFIG = {"codebook": "model"}
ALL = {"a": run(0, 400), "b": run(100, 60), "c": run(0, 405), "d": run(7, 3)}
OPS = [
    *[("step", "a", 0, 400), ("step", "b", 100, 60), ("step", "x", 50, 300), ("flush",), ("fork", "a", "c")],
    *[("flush",), ("step", "c", 400, 5), ("step", "d", 7, 3), ("drop", "x"), ("flush",)],
]
Damage = Callable[[Path], None]


def make(path: Path) -> None:
    """Make a store with sequences short and long, one forked, indexes, codebooks, tokens, and pages that were freed.

    Names are drawn from a seed and each batch is written alone, so that the same damage is done in every run.
    """
    settings = partial(SpillSettings, commit_bytes=1)
    with (
        patch("os.urandom", random.Random(6).randbytes),
        patch("kvstore.directory.SpillSettings", settings),
        KVStore.open(path, SCHEMA, small(**CONFIG)) as store,
    ):
        for op in OPS:
            perform(store, op)
        store["b"].note_tokens(range(60))
        assert found(store) == ALL
    assert (path / "codebooks.safetensors").exists()


def spill(path: Path) -> Path:
    """The data file of a store."""
    [data] = path.glob("spill-*.mdb")
    return data


def writing(change: Callable[[bytes], bytes]) -> Damage:
    """Damage to the data file, as a function of its bytes."""

    def damage(path: Path) -> None:
        data = spill(path)
        data.write_bytes(change(data.read_bytes()))

    return damage


def truncated(data: bytes) -> Iterator[Damage]:
    """At every page boundary, then at random places."""
    chance = random.Random(3)
    for n in [*range(0, len(data), PAGE), *(chance.randrange(len(data)) for _ in range(15))]:
        yield writing(lambda data, n=n: data[:n])


def records(data: bytes) -> list[tuple[int, int]]:
    """Where records begin and how long they are: those in use, and those in pages that were freed."""
    places = []
    at = data.find(b"KVRC")
    while at >= 0:
        n_bytes = HEADER + int.from_bytes(data[at + 64 : at + HEADER], "little") + CHECKSUM
        if at + n_bytes <= len(data):
            places.append((at, n_bytes))
        at = data.find(b"KVRC", at + 1)
    return places


def flipped(data: bytes) -> Iterator[Damage]:
    """A bit in each part of each record, in its key, in each meta page and in the head of each page."""
    chance = random.Random(4)
    for at, n_bytes in records(data):
        for first, stop in ((-KEY - 8, 0), (0, HEADER), (HEADER, n_bytes - CHECKSUM), (n_bytes - CHECKSUM, n_bytes)):
            if stop > first:
                yield flip(at + chance.randrange(first, stop), chance.randrange(8))
    for page in range(len(data) // PAGE):
        for _ in range(12 if page < 2 else 2):
            yield flip(page * PAGE + chance.randrange(150 if page < 2 else 40), chance.randrange(8))


def flip(at: int, bit: int) -> Damage:
    """Turn one bit of the data file around."""
    return writing(lambda data: data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


def swapped(data: bytes) -> Iterator[Damage]:
    """Two records of one length, of rows or of anything else, in each other's place."""
    by_size: dict[int, list[int]] = {}
    for at, n_bytes in records(data):
        by_size.setdefault(n_bytes, []).append(at)
    for n_bytes, places in by_size.items():
        for one, two in pairwise(places):
            yield writing(lambda data, one=one, two=two, n=n_bytes: exchanged(data, one, two, n))


def exchanged(data: bytes, one: int, two: int, n_bytes: int) -> bytes:
    """Bytes with two stretches in each other's place."""
    changed = bytearray(data)
    changed[one : one + n_bytes], changed[two : two + n_bytes] = data[two : two + n_bytes], data[one : one + n_bytes]
    return bytes(changed)


MODES = {"truncated": truncated, "flipped": flipped, "swapped": swapped}


def outcome(path: Path) -> str:
    """Open, read everything, mend and read again; raises `AssertionError` for wrong rows, or if it cannot be mended."""
    try:
        store = KVStore.open(path, SCHEMA, small(**CONFIG))
    except KVStoreError as error:
        return type(error).__name__
    with store:
        result = "whole" if set(store) == set(ALL) else "missed"
        assert set(store) <= set(ALL)
        for name in store:
            try:
                assert tokens_of(store[name]) == ALL[name]
            except KVStoreError:
                result = "cut"
        try:
            return mended(store) or result
        except KVStoreError:  # of the tree that LMDB keeps, what its verifier does not look at
            return "beyond repair"


def mended(store: KVStore) -> str:
    """Mend a store and read it again; raises `AssertionError` for wrong rows, or if that did not mend it."""
    store.check(repair=True)
    left = store.check()
    assert {finding.kind for finding in left} <= {"orphan"}, f"repair has left {left}"
    for name in store:
        tokens = tokens_of(store[name])
        assert tokens == ALL[name][: len(tokens)], f"{name!r} has rows that it never had"
    store._check()
    return "unreachable" if left else ""


def main(folder: Path, mode: str, every: int) -> None:
    make(folder / "sound")
    counts: Counter[str] = Counter()
    for i, damage in islice(enumerate(MODES[mode](spill(folder / "sound").read_bytes())), 0, None, every):
        shutil.copytree(folder / "sound", folder / "damaged")
        damage(folder / "damaged")
        try:
            counts[outcome(folder / "damaged")] += 1
        except Exception as error:
            raise AssertionError(f"damage {i}, {mode}: {error!r}") from error
        shutil.rmtree(folder / "damaged")
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
