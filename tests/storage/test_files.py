import contextlib
import errno
import os

import pytest

from kvstore.errors import CorruptStoreError, ReadOnlyStoreError, StorageError
from kvstore.storage.files import check_regular, read_capped, remove_parts, write_atomic


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "file"
    for data in (b"", b"one", b"another"):
        write_atomic(path, data)
        assert read_capped(path, 100) == data
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_above_the_cap_is_refused(tmp_path):
    write_atomic(tmp_path / "file", bytes(101))
    assert len(read_capped(tmp_path / "file", 101)) == 101
    with pytest.raises(CorruptStoreError, match="larger than the 100 bytes"):
        read_capped(tmp_path / "file", 100)


def test_links_folders_and_pipes_are_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("secret")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "folder", "pipe"):
        with pytest.raises(CorruptStoreError, match=r"is a link|is not a file"):
            read_capped(tmp_path / name, 100)
        with pytest.raises(CorruptStoreError):
            check_regular(tmp_path / name)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("secret")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert not (tmp_path / "link").is_symlink()


N_CALLS = {"fsync": 2, "replace": 1, "open": 2}  # that `write_atomic` makes: of the file, then of the folder


@pytest.mark.parametrize("call", N_CALLS)
def test_each_call_that_fails_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    real = getattr(os, call)
    for n in range(1, N_CALLS[call] + 2):
        calls = iter(range(1, 100))

        def failing(*args, n=n, calls=calls, **kwargs):
            if next(calls) == n:
                raise OSError(errno.ENOSPC, "no room")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            fails = pytest.raises(StorageError, match="free room or check the disk")
            with fails if n <= N_CALLS[call] else contextlib.nullcontext():
                write_atomic(path, b"new%d" % n)
        assert path.read_bytes() in (b"old", b"new%d" % n)
        assert os.listdir(tmp_path) == ["file"]


def test_no_right_to_write_is_an_error_of_its_own(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ReadOnlyStoreError, match="open the store read-only"):
        write_atomic(tmp_path / "file", b"")


def test_parts_of_an_interrupted_write_are_removed(tmp_path):
    (tmp_path / "file.abc.part").touch()
    (tmp_path / "other.abc.part").touch()
    remove_parts(tmp_path, "file")
    assert os.listdir(tmp_path) == ["other.abc.part"]
