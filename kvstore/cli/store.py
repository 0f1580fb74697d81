"""`kvstore inspect`, `check`, `evict` and `vacuum`: looking after a store in a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.errors import fail, one_line_errors

if TYPE_CHECKING:
    from kvstore.checking import Finding
    from kvstore.inspection import Inspection

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="Directory of the store.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
MIB = 1 << 20


def inspect(path: PathArgument, as_json: JsonOption = False) -> None:
    """Show the sequences, indexes and bytes of a store; it may be open in another process."""
    with one_line_errors():
        from kvstore.inspection import inspect_store

        found = inspect_store(path)
        if as_json:
            _print_json(found.as_dict())
        else:
            _show(found)


def check(
    path: PathArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended; lost rows stay lost.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every record of a store and say what is wrong; exits with 1 when anything is.

    Without --repair nothing is changed. With it sequences are cut to their sound rows, indexes are built again when
    they are next used, and records that no sequence names are deleted.
    """
    with one_line_errors():
        from kvstore import KVStore

        _must_exist(path)
        with KVStore.open(path, readonly=not repair, salvage=True) as store:
            found = store.check(repair=repair)
        if as_json:
            _print_json([_plain(finding) for finding in found])
        else:
            _list(found, repair)
        if found:
            raise typer.Exit(1)


def evict(
    path: PathArgument,
    max_mib: Annotated[
        float | None,
        typer.Option(min=0, help="Drop sequences, those used longest ago first, until their records take so many MiB."),
    ] = None,
    idle_hours: Annotated[
        float | None, typer.Option(min=0, help="Drop sequences that were not used for so many hours.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Drop sequences for good that nobody uses; at least one of --max-mib and --idle-hours.

    `kvstore vacuum` gives the room that they leave back to the disk.
    """
    with one_line_errors():
        from kvstore import KVStore

        _must_exist(path)
        if max_mib is None and idle_hours is None:
            fail("say --max-mib, --idle-hours or both")
        with KVStore.open(path) as store:
            max_bytes = None if max_mib is None else int(max_mib * MIB)
            dropped = store.evict(max_bytes=max_bytes, idle_s=None if idle_hours is None else 3600 * idle_hours)
            left_bytes = store.stats().disk_bytes
        if as_json:
            _print_json({"dropped": dropped, "disk_bytes": left_bytes})
        else:
            names = ": " + ", ".join(dropped) if dropped else ""
            typer.echo(f"{len(dropped)} sequences dropped{names}; {left_bytes / MIB:,.1f} MiB of records left")


def vacuum(path: PathArgument) -> None:
    """Give the disk the room back that dropped sequences have left."""
    with one_line_errors():
        from kvstore import KVStore

        _must_exist(path)
        with KVStore.open(path) as store:
            given = store.vacuum()
        typer.echo(f"{given / MIB:.1f} MiB given back")


def _must_exist(path: Path) -> None:
    if not path.is_dir():
        fail(f"there is no store in {path}")


def _show(found: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

    s = found.schema
    console = Console()
    console.print(
        f"{found.path}: {s.n_layers} layers, {s.n_q_heads} query and {s.n_kv_heads} KV heads of {s.head_dim}, "
        f"{s.dtype}, blocks of {s.block_tokens}; model {s.fingerprint or 'not named'}",
        highlight=False,
    )
    console.print(f"open to write in {found.is_open}" if found.is_open else "not open to write", highlight=False)
    table = Table()
    table.add_column("sequence")
    for name in ("rows", "MiB", "shared rows", "index", "indexed rows", "budget"):
        table.add_column(name, justify="right")
    for seq in found.sequences:
        budget = "all" if seq.budget is None else f"{seq.budget:g}"
        table.add_row(
            seq.name, f"{seq.rows:,}", f"{seq.row_bytes / MIB:,.1f}", f"{seq.shared_rows:,}", seq.index or "-",
            f"{seq.indexed_rows:,.0f}", budget,
        )  # fmt: skip
    console.print(table)
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(found.records.items()))
    records = f"{found.record_bytes / MIB:,.1f} MiB of records ({kinds or 'none'})"
    console.print(f"{records}, file of {found.file_bytes / MIB:,.1f} MiB", highlight=False)


def _list(found: list[Finding], repaired: bool) -> None:
    for finding in found:
        whose = f"{finding.sequence}: " if finding.sequence else ""
        typer.echo(f"{finding.kind}: {whose}{finding.text}" + (f"; {finding.remedy}" if repaired else ""))
    if not found:
        typer.echo("nothing is wrong")


def _plain(finding: Finding) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(finding)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1))
