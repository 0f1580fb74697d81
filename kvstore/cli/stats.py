"""`kvstore stats`: the last statistics of a store, as its writer left them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.errors import fail, one_line_errors
from kvstore.cli.store import MIB, PathArgument

if TYPE_CHECKING:
    from kvstore.stats import StoreStats
    from kvstore.stats_file import SavedStats
    from kvstore.storage.lock import Holder

EXAMPLES = "Examples:\n\nkvstore stats book.kv\n\nkvstore stats book.kv --prometheus"


def stats(
    path: PathArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table; times in seconds.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print the text format that Prometheus scrapes.")
    ] = False,
) -> None:
    """Show the statistics that a store's writer left at its last flush, how old they are, and who has it open.

    The store may be open in another process. Counters begin when that process opened it; sizes are in MiB, and in bytes
    with --json and --prometheus.
    """
    with one_line_errors():
        from kvstore.storage.lock import holder_of

        if as_json and prometheus:
            fail("--json and --prometheus exclude each other")
        _must_be_a_store(path)
        holder = holder_of(path)
        saved, why = _read(path)
        if as_json:
            _print_json(saved, why, holder)
        elif prometheus:
            _print_prometheus(saved, why)
        else:
            _show(path, saved, why, holder)


def _must_be_a_store(path: Path) -> None:
    from kvstore.storage.manifest import read_manifest

    if not path.is_dir() or read_manifest(path, readonly=True) is None:
        fail(f"there is no store in {path}")


def _read(path: Path) -> tuple[SavedStats | None, str]:
    """Return the statistics, or None and why there are none."""
    from kvstore.errors import CorruptStoreError
    from kvstore.stats_file import read_stats

    try:
        saved = read_stats(path)
    except CorruptStoreError as error:
        return None, f"no statistics: {error}"
    return saved, "" if saved is not None else "no statistics: they are written at the first flush, checkpoint or close"


def _print_json(saved: SavedStats | None, why: str, holder: Holder | None) -> None:
    from dataclasses import asdict

    found = {"reason": why, "stats": None} if saved is None else {**saved.as_dict(), "age_s": saved.age_s}
    typer.echo(json.dumps({**found, "open": None if holder is None else asdict(holder)}, indent=1))


def _print_prometheus(saved: SavedStats | None, why: str) -> None:
    from kvstore.metrics import prometheus_text

    if saved is None:
        fail(why)  # nothing printed would be taken for a store without metrics
    typer.echo(prometheus_text(saved.stats), nl=False)


def _show(path: Path, saved: SavedStats | None, why: str, holder: Holder | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    opened = "not open to write" if holder is None else f"open to write in {holder}"
    console.print(f"{path}: {opened}", highlight=False, soft_wrap=True)
    if saved is None:
        console.print(why, highlight=False, soft_wrap=True)
        return
    table = Table(title=f"written {_ago(saved.age_s)} ago by process {saved.pid}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in _lines(saved.stats):
        table.add_row(name, value)
    console.print(table)


def _lines(stats: StoreStats) -> Iterator[tuple[str, str]]:
    counters = stats.counters
    yield "sequences", f"{stats.sequences:,}"
    yield "rows in memory", f"{stats.rows:,}"
    yield "blocks in memory", f"{stats.blocks:,}"
    yield "heap, used", _mib(stats.heap_used_bytes)
    yield "heap, reserved", _mib(stats.heap_reserved_bytes)
    yield "index", f"{_mib(stats.index_bytes)}, {stats.index_bytes_per_key:.1f} bytes a key"
    yield "indexed rows of all tables", f"{stats.indexed_rows:,}"
    yield "trainings of an index", f"{stats.index_builds:,}"
    yield "the model's codebooks", _mib(stats.codebook_bytes)
    yield "memory in all", _mib(stats.memory_bytes)
    yield "largest drift", f"{stats.drift:.2f}" if stats.drift else "not known"
    yield "records on disk", _mib(stats.disk_bytes)
    yield "waiting to be written", _mib(stats.queued_bytes)
    yield "sequences taken out of memory", f"{stats.unloads:,}"
    yield "blocks on the disk only", f"{stats.disk_blocks:,}, {stats.spills:,} moved so far"
    yield "read from the disk", f"{_mib(stats.read_bytes)} in {stats.read_extents:,} extents"
    yield "buffer pool", f"{_mib(stats.pool_bytes)}, {stats.pool_blocks:,} blocks, {stats.pool_pins:,} pinned"
    yield "found in the pool", _share(stats.pool_hits, stats.pool_lookups)
    yield "left the pool, found no frame", f"{stats.pool_evictions:,}, {stats.pool_stalls:,}"
    yield "damaged records refused", f"{stats.damaged_records:,}"
    yield "attention queries", ", ".join(f"{n:,} {plan}" for plan, n in counters.attends.items())
    yield "rows they read", _share(counters.rows_attended, counters.rows_available)
    yield "top-k queries", f"{counters.topks:,}"
    yield "steps", f"{counters.steps:,}, {counters.aborted_steps:,} rolled back"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else "0"


def _ago(seconds: float) -> str:
    """Say how long, in the largest unit that has at least two."""
    for unit, size_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} seconds"
