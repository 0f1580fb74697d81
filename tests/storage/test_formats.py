"""Files that released versions wrote stay readable: each directory in tests/data/formats is one of a version."""

import json
import shutil
import struct
from pathlib import Path

import lmdb
import msgpack
import pytest
import xxhash

from kvstore.errors import UnsupportedFormatError
from kvstore.storage.catalog import decode_entry
from kvstore.storage.encodings import Encoding, decode_rows
from kvstore.storage.key import Kind, key_prefix
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.manifest import MANIFEST_NAME, plain_fields, read_manifest, write_manifest
from kvstore.storage.spill_settings import MIB, SpillSettings
from tests.data.formats import make

FORMATS = Path(make.__file__).parent
WAYS = pytest.mark.parametrize("options", [{"settings": SpillSettings(MIB)}, {"readonly": True}], ids=["write", "read"])


@pytest.fixture
def v1(tmp_path):
    return shutil.copytree(FORMATS / "v1", tmp_path / "v1")


@WAYS
def test_format_1_is_read(v1, options):
    manifest = read_manifest(v1)
    assert manifest == make.MANIFEST.closed()
    manifest.check_schema(plain_fields(make.SCHEMA))
    with LmdbTier(v1, store_id=bytes.fromhex(manifest.store_id), **options) as tier:
        assert tier.get_many(record.key for record in make.records()) == make.records()
        assert tier.n_records == len(make.records())
        entries = [decode_entry(record.payload) for record in tier.get_many(tier.iterate(key_prefix(Kind.CATALOG)))]
        assert entries == [make.entry("book", make.BOOK, 11), make.entry("fork", make.FORK, 6)]
        tier._check()


def test_format_1_is_written_on(v1):
    with LmdbTier(v1, SpillSettings(MIB)) as tier:
        tier.put_many([make.rows(1, 3, make.OPEN)])
        tier.vacuum()
    write_manifest(v1, read_manifest(v1).opened("boot"))
    with LmdbTier(v1, readonly=True) as tier:
        assert tier.get_many([make.rows(1, 3, make.OPEN).key]) == [make.rows(1, 3, make.OPEN)]
        assert tier.n_records == len(make.records()) + 1


def test_lossy_rows_of_format_1_mean_what_they_did(v1):
    shape = make.FULL
    raw = make.numbers(shape.raw_bytes, 100)
    with LmdbTier(v1, readonly=True) as tier:
        [record] = tier.get_many([make.rows(1, 0, shape).key])
    assert record.encoding is Encoding.INT8
    back = decode_rows(record.payload, shape, record.encoding)
    for a, b in zip(struct.iter_unpack("<e", raw), struct.iter_unpack("<e", back), strict=True):
        assert abs(a[0] - b[0]) < 0.003


def test_another_program_can_read_format_1_from_its_description(v1):
    """As docs/format.md tells it, without a line of the package."""
    manifest = json.loads((v1 / "manifest.json").read_text())
    assert (manifest["format"], manifest["clean"]) == (1, True)
    found = {}
    with lmdb.open(str(v1 / "spill-000001.mdb"), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        for key, value in txn.cursor():
            kind, sequence, generation, layer, number = struct.unpack(">H16sQHI", key)
            magic, version, flags, *head = struct.unpack_from("<4sHHHBB7I16sQQ", value)
            assert (magic, version, flags) == (b"KVRC", 1, 0)
            assert (head[0], head[3], head[4], head[10], head[11]) == (kind, layer, number, sequence, generation)
            assert head[12] == len(value) - 80
            seed = xxhash.xxh3_64(key).intdigest()
            assert (
                struct.unpack_from("<Q", value, len(value) - 8)[0] == xxhash.xxh3_64(value[:-8], seed=seed).intdigest()
            )
            found[kind, sequence, layer, number] = value[72:-8]
    assert found[0, bytes(16), 0, 0] == b"kvstore spill\0" + bytes.fromhex(manifest["store_id"])
    version, name, _, _, n_rows, first_row, budget, runs, layers, indexes = msgpack.unpackb(found[3, make.BOOK, 0, 0])
    assert (version, name, n_rows, first_row, budget) == (1, "book", 11, 1, 0.25)
    assert runs == [[0, -1], [5, 100]]
    assert layers[0] == [[make.BOOK, 1, 0, 2, 8], [make.BOOK, 1, 2, 1, 3]]
    assert indexes == [[make.BOOK, 1, "pq", 1, 2, 1, 6], None]
    values_of_first_block = struct.unpack_from("<32e", found[1, make.BOOK, 0, 0], 4 * 2 * 8 * 2)
    assert values_of_first_block == struct.unpack_from("<32e", make.numbers(make.FULL.raw_bytes, 0), 4 * 2 * 8 * 2)


def test_this_version_writes_what_is_kept_for_it(v1, tmp_path):
    make.write(tmp_path / "now")
    now = json.loads((tmp_path / "now" / MANIFEST_NAME).read_text())
    assert len(now.pop("xxh3_64")) == 16  # which the first directories did not have
    assert now == json.loads((v1 / MANIFEST_NAME).read_text())
    found = []
    for folder in (v1, tmp_path / "now"):
        with lmdb.open(str(folder / "spill-000001.mdb"), subdir=False, readonly=True) as env, env.begin() as txn:
            found.append(dict(txn.cursor()))
    assert found[0] == found[1]


def test_a_newer_directory_is_refused(v1):
    plain = json.loads((v1 / MANIFEST_NAME).read_text())
    for change in ({"format": 2}, {"reader_flags": ["new"]}):
        (v1 / MANIFEST_NAME).write_text(json.dumps(plain | change))
        with pytest.raises(UnsupportedFormatError, match="use a newer version"):
            read_manifest(v1, readonly=True)
