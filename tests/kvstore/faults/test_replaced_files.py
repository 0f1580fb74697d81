"""Something else in place of each file of a store: the right rows or one error, no file outside is touched, no hang."""

import dataclasses
import os
import random
import shutil
import signal
from contextlib import contextmanager

import pytest

from kvstore import CorruptStoreError, KVStore, KVStoreError
from kvstore.storage.manifest import read_manifest, write_manifest
from tests.kvstore.faults.damaged import ALL, CONFIG, make
from tests.kvstore.faults.workload import SCHEMA, assert_sound, found, small

FILES = [
    "manifest.json",
    "config.json",
    "codebooks.safetensors",
    "spill-000001.mdb",
    "spill-000001.mdb-lock",
    "writer.lock",
]
NEEDED = {"manifest.json", "spill-000001.mdb"}
KINDS = ["nothing", "an empty file", "garbage", "half of it", "a folder", "a link", "a link to nothing", "a pipe"]
WAYS = {"as it is": {}, "with settings": {"schema": SCHEMA, "config": small(**CONFIG)}, "to read": {"readonly": True}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "s"
    make(path)
    return path


@contextmanager
def no_hang(seconds=20):
    """Raise where something waits for ever, as opening a pipe may."""

    def late(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replace(path, kind, elsewhere):
    """Put something in place of a file; `elsewhere` is where a link leads to."""
    data = path.read_bytes()
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link":
        elsewhere.write_bytes(data)
        path.symlink_to(elsewhere)
    elif kind == "a link to nothing":
        path.symlink_to(elsewhere)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.write_bytes(
            {"garbage": random.Random(1).randbytes(9000), "half of it": data[: len(data) // 2]}.get(kind, b"")
        )


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_anything_in_place_of_a_file_gives_the_right_rows_or_one_error(sound, tmp_path, name, kind, way):
    path, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    shutil.copytree(sound, path)
    replace(path / name, kind, elsewhere)
    before = elsewhere.read_bytes() if elsewhere.exists() else None
    with no_hang():
        try:
            with KVStore.open(path, **WAYS[way]) as store:
                assert name not in NEEDED
                assert found(store) == ALL
                assert store.check() == []
        except KVStoreError:
            assert name != "spill-000001.mdb-lock" or kind not in ("nothing", "an empty file", "garbage", "half of it")
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == before
    if name in NEEDED:
        return
    if (path / name).is_dir():
        (path / name).rmdir()
    else:
        (path / name).unlink(missing_ok=True)
    with KVStore.open(path, SCHEMA, small(**CONFIG)) as store:
        assert found(store) == ALL
        assert_sound(store)


def test_a_data_file_that_is_gone_is_not_taken_for_an_empty_store(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "s")
    (tmp_path / "s" / "spill-000001.mdb").unlink()
    for way in WAYS.values():
        with pytest.raises(KVStoreError, match=r"spill|data file"):
            KVStore.open(tmp_path / "s", **way)
    shutil.copy(sound / "spill-000001.mdb", tmp_path / "s")
    with KVStore.open(tmp_path / "s") as store:
        assert found(store) == ALL


def test_a_store_that_could_not_be_opened_is_not_taken_for_one_that_died_with_the_system(sound, tmp_path):
    """An attempt to open a damaged store must not have its rows discarded after the next start of the system."""
    shutil.copytree(sound, tmp_path / "s")
    data = tmp_path / "s" / "spill-000001.mdb"
    data.write_bytes(b"not what it was")
    with pytest.raises(CorruptStoreError):
        KVStore.open(tmp_path / "s")
    shutil.copy(sound / "spill-000001.mdb", data)
    write_manifest(tmp_path / "s", dataclasses.replace(read_manifest(tmp_path / "s"), boot_id="of another start"))
    with KVStore.open(tmp_path / "s") as store:
        assert found(store) == ALL


def test_what_interrupted_writes_of_small_files_have_left_is_removed(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "s")
    for name in ("manifest.json.x.part", "config.json.x.part", "codebooks.safetensors.x.part"):
        (tmp_path / "s" / name).write_bytes(b"x")
    KVStore.open(tmp_path / "s").close()
    assert list((tmp_path / "s").glob("*.part")) == []
