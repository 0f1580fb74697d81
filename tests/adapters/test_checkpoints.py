"""A checkpoint is whole or it does not count."""

import json

import pytest

from kvstore.adapters.checkpoints import MANIFEST, CheckpointCache, cache_dir


def test_half_written_checkpoints_do_not_count(tmp_path):
    def dies(directory):
        (directory / "part").write_text("half")
        raise KeyboardInterrupt

    def works(directory):
        assert not list(directory.iterdir())
        (directory / "whole").write_text("whole")

    cache = CheckpointCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.get("key", dies)
    assert not (tmp_path / "key").exists()
    (tmp_path / "key.draft").mkdir()  # what a killed process leaves
    (tmp_path / "key.draft" / "part").write_text("half")
    directory = cache.get("key", works)
    assert json.loads((directory / MANIFEST).read_text()).keys() == {"whole"}
    assert cache.get("key", dies) == directory
    assert not (tmp_path / "key.draft").exists()


@pytest.mark.parametrize("name", ["weights", MANIFEST])
def test_what_is_damaged_is_made_again(tmp_path, name):
    made = []

    def make(directory):
        (directory / "weights").write_bytes(b"12345")
        made.append(directory)

    cache = CheckpointCache(tmp_path)
    directory = cache.get("key", make)
    (directory / name).write_bytes((directory / name).read_bytes()[:-1])
    assert cache.get("key", make) == directory
    assert (directory / "weights").read_bytes() == b"12345"
    assert cache.get("key", make) == directory
    assert len(made) == 2


def test_keys_are_apart(tmp_path):
    cache = CheckpointCache(tmp_path)
    one, two = (cache.get(key, lambda directory, key=key: (directory / key).touch()) for key in ("one", "two"))
    assert (one / "one").exists()
    assert (two / "two").exists()


def test_a_second_process_waits_and_finds_it_made(tmp_path):
    import threading

    began, cache, made = threading.Event(), CheckpointCache(tmp_path), []

    def slow(directory):
        began.set()
        threading.Event().wait(0.2)
        (directory / "weights").write_text("x")
        made.append("slow")

    first = threading.Thread(target=cache.get, args=("key", slow))
    first.start()
    began.wait()
    cache.get("key", lambda directory: made.append("twice"))  # another open file: flock treats it as another process
    first.join()
    assert made == ["slow"]


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORE_CACHE", "~/own")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "own" / "models"
    monkeypatch.delenv("KVSTORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "kvstore" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "kvstore" / "models"
