"""Opening and closing the directory of a durable store."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvstore.archive import Archive
from kvstore.config import StoreConfig, config_from_dict
from kvstore.errors import CorruptStoreError, KVStoreError, StorageError
from kvstore.index.rope import RopeSpec
from kvstore.last_used import LAST_USED_NAME
from kvstore.logs import log, log_event
from kvstore.row_records import RowRecords
from kvstore.schema import Schema
from kvstore.stats_file import STATS_NAME
from kvstore.storage.encodings import encoding_of
from kvstore.storage.files import check_regular, disk_error, read_capped, remove_parts, write_atomic
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.lock import DirectoryLock, holder_of
from kvstore.storage.manifest import Manifest, current_boot_id, plain_fields, read_manifest, write_manifest
from kvstore.storage.spill_files import find_data
from kvstore.storage.spill_settings import SpillSettings

CODEBOOKS_NAME = "codebooks.safetensors"
CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1 << 20


class Directory:
    """A directory that is open: locked by the one who writes, its manifest read, its spill ready.

    Attributes:
        path: of the directory.
        schema: of the rows in it.
        config: the settings given, or else those that the store was last written with.
        archive, rows: the sequences in it, and how their rows are cut into records.
        was_closed: whether the last writer closed it.
    """

    def __init__(
        self,
        path: Path | str,
        schema: Schema | None,
        config: StoreConfig | None,
        *,
        readonly: bool = False,
        salvage: bool = False,
    ) -> None:
        """Open or make a directory; with `salvage` also one whose catalog is damaged, as far as it can be read.

        Raises `StorageError` where there is none to read, or no schema to make one; `StoreLockedError`;
        `SchemaMismatchError`, `CorruptStoreError` or `UnsupportedFormatError` for what is there.
        """
        self.path = Path(path)
        self.readonly = readonly
        self._salvage = salvage
        self._lock = DirectoryLock(self.path)
        self._tier: LmdbTier | None = None
        if not readonly:
            _make(self.path)
            self._lock.acquire()
        try:
            self.config = config if config is not None else _read_config(self.path / CONFIG_NAME)
            self._open(schema)
        except BaseException:
            self._give_up()
            raise
        how = {"path": self.path, "readonly": readonly, "sequences": len(self.archive.entries)}
        log_event(log, logging.DEBUG, "store.opened", "%(path)s is open, with %(sequences)d sequences", **how)

    @property
    def codebooks_path(self) -> Path:
        """File of the model's codebooks; there need be none."""
        return self.path / CODEBOOKS_NAME

    @property
    def tier(self) -> LmdbTier:
        """The spill."""
        assert self._tier is not None
        return self._tier

    def close(self) -> None:
        """Write what waits and say that all is well; the lock is given up also where that raises."""
        try:
            self.tier.close()
            if self._lock.held:  # not in a forked child: the parent has not closed it
                write_manifest(self.path, self._manifest.closed())
        finally:
            self._give_up()
        log_event(log, logging.DEBUG, "store.closed", "%(path)s is closed", path=self.path)

    def _open(self, schema: Schema | None) -> None:
        former = manifest = read_manifest(self.path, readonly=self.readonly)
        if manifest is None:
            manifest = self._new_manifest(schema)
        else:
            self._check_stored(manifest, schema)
        self.schema = schema if schema is not None else _schema_of(manifest.schema, self.path)
        self.was_closed = manifest.clean
        if not self.readonly:
            manifest = self._begin(manifest)
        self._manifest = manifest
        try:
            self._open_spill()
        except BaseException:
            if former is not None and not self.readonly:
                with suppress(KVStoreError):  # else its rows would be discarded after the next start of the system
                    write_manifest(self.path, former)
            raise

    def _open_spill(self) -> None:
        config = self.config
        settings = None if self.readonly else SpillSettings(config.spill_bytes, config.durability)
        live = self.readonly and holder_of(self.path) is not None
        store_id = bytes.fromhex(self._manifest.store_id)
        self._tier = LmdbTier(self.path, settings, store_id=store_id, readonly=self.readonly, live=live)
        self.rows = RowRecords(self.schema, encoding_of(config.encoding))
        self.archive = Archive(self._tier, self.rows, salvage=self._salvage)

    def _check_stored(self, manifest: Manifest, schema: Schema | None) -> None:
        """Raise where what lies in the directory is not what its manifest, or the schema given, says."""
        if schema is not None:
            manifest.check_schema(plain_fields(schema), self.path)
        if os.path.lexists(self.codebooks_path):
            check_regular(self.codebooks_path)
        if manifest.clean and find_data(self.path) is None:
            raise CorruptStoreError(f"the spill of {self.path} is gone; put it back, or remove the manifest as well")

    def _new_manifest(self, schema: Schema | None) -> Manifest:
        if self.readonly or schema is None:
            what = "open it without readonly" if self.readonly else "give the schema of the rows"
            raise StorageError(f"there is no store in {self.path}; {what} to make one")
        if find_data(self.path) is not None:
            raise CorruptStoreError(f"{self.path} holds a spill but no manifest; put it back, or remove the spill")
        return Manifest(os.urandom(16).hex(), plain_fields(schema), self.config.durability, clean=True)

    def _begin(self, manifest: Manifest) -> Manifest:
        """Note that a writer has the directory; discard what a loss of power may have torn."""
        boot_id = current_boot_id()
        if not manifest.survives(boot_id):
            data = find_data(self.path)
            why = "the system stopped while %(path)s was open with durability='process': its rows are lost"
            log_event(log, logging.WARNING, "spill.discarded", why, path=self.path)
            if data is not None:
                data.unlink()
        manifest = Manifest(**{**manifest.__dict__, "durability": self.config.durability}).opened(boot_id)
        write_manifest(self.path, manifest)
        for name in (CONFIG_NAME, CODEBOOKS_NAME, STATS_NAME, LAST_USED_NAME):
            remove_parts(self.path, name)
        write_atomic(self.path / CONFIG_NAME, _config_bytes(self.config))
        return manifest

    def _give_up(self) -> None:
        try:
            if self._tier is not None and not self._tier.closed:
                self._tier.close()
        finally:
            self._lock.release()


def _config_bytes(config: StoreConfig) -> bytes:
    """Settings as JSON; a budget that is a rule cannot be written, and means all rows when it is read."""
    plain = asdict(replace(config, budget=None) if callable(config.budget) else config)
    return json.dumps(plain, indent=1).encode()


def _read_config(path: Path) -> StoreConfig:
    """Return the settings in a file, the defaults where there is none; raises `CorruptStoreError`."""
    try:
        return config_from_dict(json.loads(read_capped(path, MAX_CONFIG_BYTES)))
    except FileNotFoundError:
        return StoreConfig()
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptStoreError(f"{path} holds no settings: {error}; give them to open()") from None


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StorageError(f"{path} is a file; a store needs a directory") from error
    except OSError as error:
        raise disk_error(f"{path} cannot be made", error) from error


def _schema_of(plain: dict[str, Any], path: Path) -> Schema:
    """Return the schema that a manifest holds as plain values."""
    try:
        specs = plain.get("rope", [])
        rope = tuple(
            None if spec is None else RopeSpec(**{**spec, "inv_freq": tuple(spec["inv_freq"])}) for spec in specs
        )
        schema = Schema(**{**plain, "rope": rope})
    except Exception as error:
        raise CorruptStoreError(f"the manifest in {path} holds no schema: {error}; restore it") from error
    if plain_fields(schema) != plain:
        raise CorruptStoreError(f"the schema in the manifest of {path} is not one of this version: {asdict(schema)}")
    return schema
