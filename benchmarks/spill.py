"""The spill beside raw py-lmdb with the same extents, and beside one plain file an extent.

`python -m benchmarks.spill --json build/bench/spill.json`: two minutes. All write and read the same bytes, in turn, in
one run; what each has written is compared with what it was given, untimed, after every round.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Protocol

import lmdb
import typer

from benchmarks.report import Metric, Report
from benchmarks.timing import Contender, Tell, interleave, medians
from kvstore.storage.files import sync_folder
from kvstore.storage.key import Kind, RecordKey
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.record import Record
from kvstore.storage.shape import RowShape
from kvstore.storage.spill_settings import DURABILITIES, SpillSettings

OURS, RAW, FILES = "LmdbTier", "raw py-lmdb", "plain files"
WRITE = Metric("write", "MB/s", "higher")
READ = Metric("read", "MB/s", "higher")
FREED_BYTES = 24 << 20
EXTENT = RowShape("float16", n_blocks=1, n_tokens=64, n_heads=8, key_dim=128, value_dim=128)


@dataclass(frozen=True)
class Options:
    """Sizes of a run.

    Attributes:
        n_extents: written, and read, a round.
        batch: extents of a batch (ours), a transaction (raw LMDB); of a read as well.
        shape: rows of an extent; float16, 8 KV heads of 128, 64 tokens are 256 KiB.
        rounds: of which the median is taken.
        settle_seconds: pause after each round of writing.
    """

    n_extents: int = 512
    batch: int = 32
    shape: RowShape = EXTENT
    rounds: int = 9
    settle_seconds: float = 0.5


QUICK = Options(n_extents=64, batch=16, rounds=3, settle_seconds=0.1)


class Store(Protocol):
    """One competitor: `numbers` are extents, payloads come from `Work.payload`."""

    def write(self, numbers: range) -> None:
        """Write extents as one batch."""

    def finish(self) -> None:
        """Wait until all is as safe as the durability promises."""

    def read(self, numbers: list[int]) -> list[Any]:
        """Return payloads."""

    def close(self) -> None:
        """Give everything up."""


class Work:
    """What is written, in which order it is read, and whether it came back."""

    def __init__(self, options: Options) -> None:
        self.options = options
        chance = random.Random(0)
        self._payloads = [
            chance.randbytes(options.shape.raw_bytes) for _ in range(options.n_extents)
        ]  # none twice: caches would know it
        self.order = list(range(options.n_extents))
        chance.shuffle(self.order)

    @property
    def megabytes(self) -> float:
        """Payload of one round."""
        return self.options.n_extents * self.options.shape.raw_bytes / 1e6

    def payload(self, number: int) -> bytes:
        """Bytes of an extent."""
        return self._payloads[number % self.options.n_extents]

    def write(self, store: Store) -> None:
        """Write every extent."""
        self._write(store, range(self.options.n_extents))

    def warm_up(self, store: Store) -> None:
        """Write some others first: a process that has just begun pays for every page of memory that it touches."""
        n = self.options.n_extents
        self._write(store, range(n, n + n // 4))

    def read(self, store: Store) -> None:
        """Read every extent, at random."""
        for numbers in self._batches():
            store.read(numbers)

    def check(self, store: Store, name: str) -> None:
        """Stop the run unless every extent comes back as it was written."""
        for numbers in self._batches():
            for number, payload in zip(numbers, store.read(numbers), strict=True):
                if payload is None or bytes(payload) != self.payload(number):
                    raise SystemExit(f"extent {number} did not come back from {name} as it was written")

    def _write(self, store: Store, numbers: range) -> None:
        for at in range(0, len(numbers), self.options.batch):
            store.write(numbers[at : at + self.options.batch])
        store.finish()

    def _batches(self) -> Iterator[list[int]]:
        for at in range(0, len(self.order), self.options.batch):
            yield self.order[at : at + self.options.batch]


class OurStore:
    """The tier; it copies what it is given."""

    def __init__(self, folder: Path, work: Work, durability: str) -> None:
        self._work = work
        self._tier = LmdbTier(folder, SpillSettings(map_bytes(work), durability))

    def write(self, numbers: range) -> None:
        """Hand a batch to the tier."""
        shape = self._work.options.shape
        self._tier.put_many(Record(_key(number), self._work.payload(number), shape) for number in numbers)

    def finish(self) -> None:
        """Wait for the writer."""
        self._tier.flush()

    def read(self, numbers: list[int]) -> list[Any]:
        """Return payloads whose checksums hold."""
        return [record and record.payload for record in self._tier.get_many(map(_key, numbers))]

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()


class RawStore:
    """LMDB as it is, with the tier's settings and keys: no header, no checksum, no queue."""

    def __init__(self, folder: Path, work: Work, durability: str) -> None:
        self._work = work
        power = durability == "power"
        options = {"map_size": map_bytes(work), "subdir": False, "sync": power, "metasync": power}
        self._env = lmdb.open(str(folder / "raw.mdb"), **options)  # type: ignore[arg-type]

    def write(self, numbers: range) -> None:
        """Write a batch in one transaction."""
        with self._env.begin(write=True) as txn:
            for number in numbers:
                txn.put(_key(number).pack(), self._work.payload(number))

    def finish(self) -> None:
        """Do nothing: a transaction is committed when it returns."""

    def read(self, numbers: list[int]) -> list[Any]:
        """Return copies."""
        with self._env.begin() as txn:
            return [txn.get(_key(number).pack()) for number in numbers]

    def close(self) -> None:
        """Close LMDB."""
        self._env.close()


class FileStore:
    """One file an extent."""

    def __init__(self, folder: Path, work: Work, durability: str) -> None:
        self._folder, self._work, self._power = folder, work, durability == "power"

    def write(self, numbers: range) -> None:
        """Write the files, and wait for the disk if they must survive a loss of power."""
        for number in numbers:
            with (self._folder / str(number)).open("wb") as file:
                file.write(self._work.payload(number))
                if self._power:
                    file.flush()
                    os.fsync(file.fileno())
        if self._power:
            sync_folder(self._folder)

    def finish(self) -> None:
        """Do nothing: `write` has waited."""

    def read(self, numbers: list[int]) -> list[Any]:
        """Return the contents of the files."""
        return [(self._folder / str(number)).read_bytes() for number in numbers]

    def close(self) -> None:
        """Nothing is open."""


STORES: dict[str, Callable[[Path, Work, str], Store]] = {
    OURS: OurStore,
    RAW: RawStore,
    FILES: FileStore,
}


def run_spill(options: Options, folder: Path, report: Report, tell: Tell) -> None:
    """Add rows for writing and reading with both durabilities; reads do not depend on it and are done once."""
    work = Work(options)
    size = f"{options.n_extents} extents of {options.shape.raw_bytes >> 10} KiB"
    for durability in DURABILITIES:
        times = {}
        for names in (
            set(STORES) - {FILES},
            {FILES},
        ):  # files come last: their syncs and deletions slow the next one down
            contenders = [_writer(name, folder, work, durability) for name in STORES if name in names]
            label = f"write, {durability}"
            times |= medians(interleave(contenders, options.rounds, lambda line, label=label: tell(f"{label}, {line}")))  # type: ignore[misc]
        _add(report, f"{size}, durability {durability}", WRITE, work, times)
    with _written(folder, work) as stores:
        contenders = [Contender(name, lambda store=store: work.read(store)) for name, store in stores.items()]  # type: ignore[misc]
        times = medians(interleave(contenders, options.rounds, lambda line: tell(f"read, {line}")))
        _add(report, f"{size}, in the system's cache", READ, work, times)
        for name, store in stores.items():
            work.check(store, name)


def map_bytes(work: Work) -> int:
    """Room for all extents, twice."""
    return max(2 << 20, 2 * work.options.n_extents * (work.options.shape.raw_bytes + 8192))


def _key(number: int) -> RecordKey:
    return RecordKey(Kind.ROWS, bytes(16), 0, 0, number)


def _writer(name: str, folder: Path, work: Work, durability: str) -> Contender:
    """Write into a new folder each round; opening, warming up, checking and removing is not timed."""
    held: list[Store] = []

    @contextmanager
    def scope() -> Iterator[None]:
        place = Path(tempfile.mkdtemp(dir=folder))
        held[:] = [STORES[name](place, work, durability)]
        work.warm_up(held[0])
        try:
            yield
            work.check(held[0], name)
        finally:
            held[0].close()
            shutil.rmtree(place)
            os.sync()  # or the next one pays for what this one left to the system,
            time.sleep(work.options.settle_seconds)  # and to the disk

    return Contender(name, lambda: work.write(held[0]), scope)


@contextmanager
def _written(folder: Path, work: Work) -> Iterator[dict[str, Store]]:
    places = {name: Path(tempfile.mkdtemp(dir=folder)) for name in (OURS, RAW, FILES)}
    stores = {name: STORES[name](place, work, "process") for name, place in places.items()}
    try:
        for store in stores.values():
            work.write(store)
            work.read(store)
        yield stores
    finally:
        for name, store in stores.items():
            store.close()
            shutil.rmtree(places[name])


def _add(report: Report, case: str, metric: Metric, work: Work, times: dict[str, float]) -> None:
    rates = {name: work.megabytes / seconds for name, seconds in times.items()}
    for peer in (RAW, FILES):
        report.add(case, metric, rates[OURS], peer, rates[peer])


def _settle_allocator() -> None:
    """Free a large block once: the C library keeps freed memory up to twice the largest block that it saw freed.

    Else it gives memory back to the system after each transaction, and pays for every page of it at the next one. A
    process with a model has freed large arrays long ago.
    """
    block = bytearray(FREED_BYTES)
    del block


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few extents and rounds: seconds.")] = False,
    folder: Annotated[Path, typer.Option(help="Where to write; on the disk to be measured.")] = Path("build/bench"),
) -> None:
    """Write and read rates of the spill beside raw LMDB and plain files."""
    from benchmarks.machine import describe_machine
    from benchmarks.setup import reported

    versions = {name: metadata.version(name) for name in ("lmdb", "xxhash")}
    report = Report("spill", {**describe_machine(), **versions})
    _settle_allocator()
    folder.mkdir(parents=True, exist_ok=True)
    with reported(report, json) as tell, tempfile.TemporaryDirectory(dir=folder) as place:
        run_spill(QUICK if quick else Options(), Path(place), report, tell)


if __name__ == "__main__":
    app()
