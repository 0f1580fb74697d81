"""A disk or a quota that is full, and a disk that cannot be written: an error, memory right, and it goes on."""

import pytest

from kvstore import KVStore, KVStoreError, ReadOnlyStoreError, StorageError
from tests.kvstore.faults.workload import SCHEMA, found, perform, run, small
from tests.storage.processes import run_python
from tests.storage.test_lmdb_full import remount, small_disk

assert small_disk  # a fixture
KIB = 1 << 10


def check_again(path, model, **changes):
    with KVStore.open(path, SCHEMA, small(**changes)) as store:
        assert found(store) == model


def test_a_disk_that_fills_up_is_an_error_and_the_store_goes_on_when_there_is_room(small_disk):
    path, ballast = small_disk / "s", small_disk / "ballast"
    with KVStore.open(path, SCHEMA, small(flush_rows=0)) as store:
        perform(store, ("step", "a", 0, 400))
        store.flush()
        ballast.write_bytes(bytes((4 << 20) - 160 * KIB - sum(file.stat().st_size for file in path.iterdir())))
        perform(store, ("step", "b", 100, 500))
        perform(store, ("step", "c", 300, 500))
        with pytest.raises(StorageError):
            for _ in range(20):
                perform(store, ("step", "c", 0, 500))
                store.flush()
        model = {"a": run(0, 400), "b": run(100, 500), "c": found(store)["c"]}
        assert found(store) == model
        with pytest.raises(StorageError):
            for _ in range(20):
                store.vacuum()
                perform(store, ("step", "b", 0, 500))
                model["b"] += run(0, 500)
                store.flush()
        model = found(store)
        ballast.unlink()
        store.flush()
        assert found(store) == model
    check_again(path, model, flush_rows=0)


def test_a_disk_that_is_full_at_the_start_makes_no_half_store(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes((4 << 20) - 8 * KIB))
    with pytest.raises(KVStoreError):
        KVStore.open(small_disk / "s", SCHEMA, small())
    ballast.unlink()
    with KVStore.open(small_disk / "s", SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 50))
    check_again(small_disk / "s", {"a": run(0, 50)})


def test_a_read_only_disk_can_be_read_and_is_an_error_to_write(small_disk):
    path = small_disk / "s"
    with KVStore.open(path, SCHEMA, small()) as store:
        perform(store, ("step", "a", 0, 50))
    remount(small_disk, "ro")
    with pytest.raises((ReadOnlyStoreError, StorageError)):
        KVStore.open(path, SCHEMA, small())
    with pytest.raises(KVStoreError):
        KVStore.open(small_disk / "other", SCHEMA, small())
    with KVStore.open(path, readonly=True) as store:
        assert found(store) == {"a": run(0, 50)}
        with pytest.raises(ReadOnlyStoreError):
            perform(store, ("step", "a", 50, 1))


LIMITED = """
import resource, sys
from kvstore import KVStore, StorageError
from tests.kvstore.faults.workload import SCHEMA, found, perform, run, small
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
store = KVStore.open(sys.argv[1], SCHEMA, small())
perform(store, ("step", "a", 0, 300)); store.flush()
n, errors = 300, 0
for _ in range(20):
    try:
        perform(store, ("step", "a", n, 100))
        store.flush()
    except StorageError:
        errors += 1
    n += 100
    assert found(store) == {"a": run(0, n)}, n
assert errors > 3
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.flush()
store.close()
print(n)
"""


def test_a_file_that_may_not_grow_is_an_error_and_not_the_end_of_the_process(tmp_path):
    n = int(run_python(LIMITED, tmp_path / "s"))
    assert n == 2300
    check_again(tmp_path / "s", {"a": run(0, n)})
