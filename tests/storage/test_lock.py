import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from kvstore.errors import CorruptStoreError, ReadOnlyStoreError, StorageError, StoreLockedError
from kvstore.storage import lock
from kvstore.storage.lock import LOCK_NAME, UNKNOWN, DirectoryLock, holder_of
from tests.storage.processes import ROOT, run_python

HOLD = """
import sys
from kvstore.storage.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def start_holder(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_writer_is_told_who_is_the_first(tmp_path):
    with DirectoryLock(tmp_path) as lock:
        assert lock.held
        lock.acquire()  # has it already
        with pytest.raises(StoreLockedError, match=rf"open to write in process {os.getpid()} on .* since 20"):
            DirectoryLock(tmp_path).acquire()
        assert holder_of(tmp_path).pid == os.getpid()
        code = "import sys; from kvstore.storage.lock import DirectoryLock; DirectoryLock(sys.argv[1]).acquire()"
        assert f"StoreLockedError: {tmp_path} is open to write in process {os.getpid()}" in run_python(
            code, tmp_path, fails=True
        )
    assert not lock.held
    assert holder_of(tmp_path) is None
    lock.release()
    with DirectoryLock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_simply_taken(tmp_path):
    child = start_holder(tmp_path)
    with pytest.raises(StoreLockedError, match=f"process {child.pid}"):
        DirectoryLock(tmp_path).acquire()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with DirectoryLock(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()


def test_a_child_that_outlives_the_holder_is_named_as_the_reason(tmp_path):
    code = """
import os, sys
from kvstore.storage.lock import DirectoryLock
DirectoryLock(sys.argv[1]).acquire()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child.stdout.readline()
    child.wait()
    with pytest.raises(StoreLockedError, match="it has ended, but a child that it forked lives on"):
        DirectoryLock(tmp_path).acquire()
    child.stdin.close()
    child.stdout.close()


def test_a_forked_child_does_not_unlock_for_its_parent(tmp_path):
    code = """
import os, sys
from kvstore.errors import StoreLockedError
from kvstore.storage.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire()
pid = os.fork()
if pid == 0:
    assert not lock.held
    lock.release()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
try:
    DirectoryLock(sys.argv[1]).acquire()
except StoreLockedError:
    print("still held")
"""
    assert run_python(code, tmp_path) == "still held\n"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"pid": "x"}', '{"pid": -1, "host": 3, "since": 4}', "[" * 4096]
)
def test_whatever_the_file_says_the_lock_holds(tmp_path, text):
    with DirectoryLock(tmp_path):
        (tmp_path / LOCK_NAME).write_text(text)
        assert holder_of(tmp_path) == UNKNOWN
        with pytest.raises(StoreLockedError, match="an unknown host"):
            DirectoryLock(tmp_path).acquire()
    with DirectoryLock(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_links_and_folders_are_refused(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / LOCK_NAME).symlink_to("secret")
    for call in (DirectoryLock(tmp_path).acquire, lambda: holder_of(tmp_path)):
        with pytest.raises(CorruptStoreError, match="is a link"):
            call()
    assert (tmp_path / "secret").read_text() == "secret"
    (tmp_path / LOCK_NAME).unlink()
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(CorruptStoreError, match="is not a file"):
        DirectoryLock(tmp_path).acquire()


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path):
    assert holder_of(tmp_path / "none") is None
    with pytest.raises((StorageError, ReadOnlyStoreError), match="cannot be opened"):
        DirectoryLock(tmp_path / "none").acquire()


def test_a_lock_that_is_free_a_moment_later_is_taken(tmp_path, monkeypatch):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: first.release())
    second.acquire()
    assert second.held
    assert not first.held
    second.release()


def test_a_system_that_has_no_locks_is_an_error_and_nothing_stays_open(tmp_path, monkeypatch):
    def refuse(handle, how):
        """What a network file system may say."""
        raise OSError(errno.ENOLCK, "no locks available")

    before = len(os.listdir("/proc/self/fd"))
    mine = DirectoryLock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", refuse)
        with pytest.raises(StorageError, match="no locks available"):
            mine.acquire()
    assert not mine.held
    assert len(os.listdir("/proc/self/fd")) == before
    mine.acquire()
    assert mine.held
    mine.release()
