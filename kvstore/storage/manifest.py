"""The manifest: which store a directory is, and whether it was closed well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from kvstore.errors import ConfigError, CorruptStoreError, SchemaMismatchError, UnsupportedFormatError
from kvstore.storage.files import Hook, no_hook, read_capped, remove_parts, write_atomic
from kvstore.storage.spill_settings import DURABILITIES

CHECKSUM = "xxh3_64"
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
FORMAT = 1
KNOWN_FLAGS: frozenset[str] = frozenset()  # features of the format, beyond the first version's, that are known here
MAX_FLAGS = 64
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TYPES = {"format": int, "store_id": str, "schema": dict, "durability": str, "clean": bool, "boot_id": str}
_TYPES |= {"reader_flags": list, "writer_flags": list, "versions": dict}


@dataclass(frozen=True)
class Manifest:
    """What a directory says of itself.

    Attributes:
        store_id: 32 hexadecimal digits, the same in the spill.
        schema: fields of the schema as plain values, see `plain_fields`.
        durability: "process" or "power", see `SpillSettings`.
        clean: whether the last writer closed it; False while one has it open.
        boot_id: of the system at the time, "" if unknown.
        reader_flags, writer_flags: features that a program must know to read, or to write, the directory.
        versions: of the libraries that wrote it, for people.
        format: of the directory.
    """

    store_id: str
    schema: dict[str, Any]
    durability: str
    clean: bool = False
    boot_id: str = ""
    reader_flags: tuple[str, ...] = ()
    writer_flags: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def survives(self, boot_id: str) -> bool:
        """Whether what was written is still whole on a system with this boot id.

        With durability="process" the system's cache holds what the disk may not have: after a restart without a clean
        close, commits may be on disk in any order. Then the spill must be made anew.
        """
        return self.clean or self.durability == "power" or (bool(boot_id) and boot_id == self.boot_id)

    def opened(self, boot_id: str) -> Manifest:
        """Return the manifest to write when a writer opens the directory."""
        return replace(self, clean=False, boot_id=boot_id, versions=library_versions())

    def closed(self) -> Manifest:
        """Return the manifest to write last, when everything else is on disk."""
        return replace(self, clean=True)

    def check_schema(
        self, schema: Mapping[str, Any], path: Path | str = "the store", *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Raise `SchemaMismatchError` for the first field in which another schema (plain values) differs.

        `defaults` says what a field meant before it existed, for directories that do not have it.
        """
        known = {**(defaults or {}), **self.schema}
        for name in sorted({*self.schema, *schema}):
            stored, wanted = known.get(name, "absent"), schema.get(name, "absent")
            if stored != wanted or type(stored) is not type(wanted):
                raise SchemaMismatchError(
                    f"{name} is {_short(stored)} in {path}, but {_short(wanted)} in the schema given; "
                    f"open it with the schema it was made with, or make another store"
                )


def read_manifest(folder: Path | str, *, readonly: bool = False) -> Manifest | None:
    """Return the manifest of a directory, None when it has none.

    Raises `CorruptStoreError` for a file that is damaged, a link or too large, and `UnsupportedFormatError` for one
    that is newer, or needs a feature unknown here (to write: unless `readonly`).
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        data = read_capped(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        plain = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptStoreError(f"{path} is damaged: {error}; restore it, or remove the store") from None
    return _parse(path, plain, readonly)


def write_manifest(folder: Path | str, manifest: Manifest, hook: Hook = no_hook) -> None:
    """Replace the manifest of a directory, whole or not at all, and wait for the disk."""
    path = Path(folder) / MANIFEST_NAME
    plain = asdict(manifest)
    plain[CHECKSUM] = _checksum(plain)
    data = json.dumps(plain, indent=1, sort_keys=True, allow_nan=False).encode()
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"a manifest of {len(data)} bytes is above the {MAX_MANIFEST_BYTES} allowed")
    remove_parts(path.parent, MANIFEST_NAME)
    write_atomic(path, data, hook)


def plain_fields(schema: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as values that JSON keeps: tuples become lists, dataclasses dicts."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(schema), allow_nan=False))
    return plain


def current_boot_id() -> str:
    """Return an id of this start of the system, "" where there is none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that write files."""
    found = {}
    for name in ("kvstore-engine", "lmdb", "msgpack", "xxhash"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            continue
    return found


def _parse(path: Path, plain: Any, readonly: bool) -> Manifest:
    if not isinstance(plain, dict) or type(plain.get("format")) is not int:
        raise CorruptStoreError(f"{path} is no manifest: it does not say its format; restore it, or remove the store")
    if plain["format"] > FORMAT:
        raise UnsupportedFormatError(
            f"{path} is of format {plain['format']}, known here is {FORMAT}; use a newer version"
        )
    if CHECKSUM in plain and plain[CHECKSUM] != _checksum(plain):
        raise CorruptStoreError(f"{path} is damaged: its checksum is not that of its values; restore it")
    for name, kind in _TYPES.items():
        if type(plain.get(name)) is not kind:
            raise CorruptStoreError(
                f"{path}: {name} must be {kind.__name__}, not {_short(plain.get(name))}; restore it"
            )
    _check_values(path, plain)
    needed = {*plain["reader_flags"], *(() if readonly else plain["writer_flags"])}
    if needed - KNOWN_FLAGS:
        unknown = ", ".join(sorted(needed - KNOWN_FLAGS))
        raise UnsupportedFormatError(f"{path} needs features unknown here: {unknown}; use a newer version")
    known = {f.name: plain[f.name] for f in fields(Manifest)}  # what else a newer version has added does no harm
    known |= {name: tuple(plain[name]) for name in ("reader_flags", "writer_flags")}
    return Manifest(**known)


def _check_values(path: Path, plain: dict[str, Any]) -> None:
    flags = plain["reader_flags"] + plain["writer_flags"]
    good = {
        "format": plain["format"] >= 1,
        "store_id": len(plain["store_id"]) == 32 and set(plain["store_id"]) <= set("0123456789abcdef"),
        "durability": plain["durability"] in DURABILITIES,
        "flags": len(flags) <= MAX_FLAGS and all(isinstance(flag, str) and 0 < len(flag) <= 64 for flag in flags),
        "versions": all(isinstance(text, str) for text in plain["versions"].values()),
    }
    wrong = [name for name, is_good in good.items() if not is_good]
    if wrong:
        raise CorruptStoreError(f"{path}: {wrong[0]} is out of its range; restore it, or remove the store")


def _checksum(plain: dict[str, Any]) -> str:
    """Checksum of a manifest's values, its own left out; older directories have none."""
    values = {name: value for name, value in plain.items() if name != CHECKSUM}
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:100] + f"... ({len(text)} characters)"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
