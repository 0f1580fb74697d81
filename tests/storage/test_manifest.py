import dataclasses
import json
import os

import pytest

from kvstore import Schema
from kvstore.errors import ConfigError, CorruptStoreError, SchemaMismatchError, StorageError, UnsupportedFormatError
from kvstore.index.rope import RopeSpec
from kvstore.storage import manifest as module
from kvstore.storage.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    current_boot_id,
    library_versions,
    plain_fields,
    read_manifest,
    write_manifest,
)

SCHEMA = Schema(2, 4, 2, 16, rope=(RopeSpec((1.0, 0.1)), None), fingerprint="model")
MANIFEST = Manifest("0123456789abcdef" * 2, plain_fields(SCHEMA), "process")


def change(folder, **values):
    """Write the manifest, then change fields of the file; None takes one away. It has no checksum then."""
    write_manifest(folder, MANIFEST)
    plain = json.loads((folder / MANIFEST_NAME).read_text()) | {"xxh3_64": None} | values
    plain = {name: value for name, value in plain.items() if value is not None}
    (folder / MANIFEST_NAME).write_text(json.dumps(plain))


def test_a_manifest_comes_back_as_it_was(tmp_path):
    assert read_manifest(tmp_path) is None
    for manifest in (MANIFEST, MANIFEST.opened("boot"), MANIFEST.opened("boot").closed()):
        write_manifest(tmp_path, manifest)
        assert read_manifest(tmp_path) == manifest
        read_manifest(tmp_path).check_schema(plain_fields(SCHEMA))
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


def test_only_a_process_that_died_with_the_system_leaves_doubts():
    opened = MANIFEST.opened("this boot")
    assert opened.survives("this boot")
    assert not opened.survives("another")
    assert not MANIFEST.opened("").survives("")
    assert opened.closed().survives("another")
    assert dataclasses.replace(opened, durability="power").survives("another")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 32),
        ("dtype", "float16"),
        ("fingerprint", "another model"),
        ("n_layers", 3),
        ("rope", ()),
        ("rope", (RopeSpec((1.0, 0.2)), None)),
        ("block_tokens", 32),
    ],
)
def test_another_schema_is_refused_with_the_field_and_both_values(field, value):
    settings = {field: value, "rope": ()} if field == "n_layers" else {field: value}
    manifest = (
        dataclasses.replace(MANIFEST, schema={**MANIFEST.schema, "rope": []}) if field == "n_layers" else MANIFEST
    )
    other = plain_fields(dataclasses.replace(SCHEMA, **settings))
    with pytest.raises(SchemaMismatchError, match=rf"^{field} is .* in the store, but .* in the schema given"):
        manifest.check_schema(other)


def test_a_field_that_one_side_lacks_is_a_mismatch():
    with pytest.raises(SchemaMismatchError, match=r"new_field is 'absent' in book\.kv, but 3 in"):
        MANIFEST.check_schema({**MANIFEST.schema, "new_field": 3}, "book.kv")
    with pytest.raises(SchemaMismatchError, match=r"dtype is 'float32'.*'absent'"):
        MANIFEST.check_schema({name: value for name, value in MANIFEST.schema.items() if name != "dtype"})


def test_a_field_that_is_newer_than_the_directory_has_its_default():
    newer = {**MANIFEST.schema, "new_field": 3}
    MANIFEST.check_schema(newer, defaults={"new_field": 3, "dtype": "never used"})
    with pytest.raises(SchemaMismatchError, match="new_field is 4"):
        MANIFEST.check_schema(newer, defaults={"new_field": 4})


def test_unknown_features_are_refused_those_of_writers_only_to_write(tmp_path):
    change(tmp_path, reader_flags=["zip"])
    for readonly in (True, False):
        with pytest.raises(UnsupportedFormatError, match="needs features unknown here: zip; use a newer version"):
            read_manifest(tmp_path, readonly=readonly)
    change(tmp_path, writer_flags=["journal"])
    with pytest.raises(UnsupportedFormatError, match="journal"):
        read_manifest(tmp_path)
    assert read_manifest(tmp_path, readonly=True).writer_flags == ("journal",)


def test_a_newer_format_is_refused_before_anything_else_is_read(tmp_path):
    (tmp_path / MANIFEST_NAME).write_text('{"format": 2, "whatever": []}')
    with pytest.raises(UnsupportedFormatError, match="of format 2, known here is 1"):
        read_manifest(tmp_path)


def test_what_a_newer_version_has_added_does_no_harm(tmp_path):
    change(tmp_path, comment="hello")
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    "values",
    [
        {"store_id": "xyz"},
        {"store_id": 5},
        {"store_id": "../../etc/passwd/../../etc/passw"},
        {"durability": "never"},
        {"clean": 1},
        {"clean": None},
        {"schema": []},
        {"format": True},
        {"format": 0},
        {"format": None},
        {"reader_flags": [1]},
        {"reader_flags": "zip"},
        {"writer_flags": [""]},
        {"writer_flags": ["x"] * 65},
        {"versions": {"lmdb": 3}},
        {"boot_id": None},
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, values):
    change(tmp_path, **values)
    with pytest.raises(CorruptStoreError, match="restore it"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b'{"format": NaN}', b"1" * 10_000]
)
def test_garbage_is_refused(tmp_path, data):
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(CorruptStoreError, match="restore it"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_cut_off_anywhere_is_refused(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    data = (tmp_path / MANIFEST_NAME).read_bytes()
    for n in range(len(data)):
        (tmp_path / MANIFEST_NAME).write_bytes(data[:n])
        with pytest.raises(CorruptStoreError):
            read_manifest(tmp_path)


def test_links_and_large_files_are_refused(tmp_path):
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / MANIFEST_NAME).symlink_to("elsewhere")
    with pytest.raises(CorruptStoreError, match="is a link"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    (tmp_path / MANIFEST_NAME).write_bytes(b" " * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(CorruptStoreError, match="larger than"):
        read_manifest(tmp_path)
    with pytest.raises(ConfigError, match="above the 4194304 allowed"):
        write_manifest(tmp_path, dataclasses.replace(MANIFEST, versions={"x": "y" * MAX_MANIFEST_BYTES}))


def test_a_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    write_manifest(tmp_path, MANIFEST)

    def full(*args):
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError):
        write_manifest(tmp_path, MANIFEST.closed())
    assert read_manifest(tmp_path) == MANIFEST
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


def test_the_id_of_a_boot_stays(monkeypatch, tmp_path):
    assert current_boot_id() == current_boot_id()
    monkeypatch.setattr(module, "BOOT_ID", tmp_path / "none")
    assert current_boot_id() == ""


def test_versions_are_those_of_what_writes():
    assert {"lmdb", "msgpack", "xxhash"} <= set(library_versions())


def test_every_flipped_bit_in_a_manifest_is_found(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    data = path.read_bytes()
    at = data.index(b"xxh3_64")
    for bit in range(0, 8 * len(data), 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = read_manifest(tmp_path)
        except (CorruptStoreError, UnsupportedFormatError):
            continue
        # White space that became another kind of it, and the name of the checksum itself: the values are right.
        assert found == MANIFEST
        assert chr(data[bit // 8]).isspace() or at <= bit // 8 < at + 7
