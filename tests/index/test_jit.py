"""How kernels are compiled and stored, and what importing does not do."""

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

import kvstore.index
from kvstore.index.jit import jit
from kvstore.index.jit_cache import KernelCache, cache_directory, fingerprint
from kvstore.index.pq import PQIndex
from kvstore.index.threads import kernel_threads, run_parallel
from tests.index.oracles import normal

SOURCES = sorted(Path(str(kvstore.index.__file__)).parent.glob("*.py"))


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_compiles_and_starts_nothing(tmp_path: Path) -> None:
    code = """
import sys, threading
import kvstore.index
assert "numba" not in sys.modules
import kvstore.index.pq, kvstore.index.flat, kvstore.index.warming
from numba.core import dispatcher
import gc
assert threading.active_count() == 1
kernels = [d for d in gc.get_objects() if isinstance(d, dispatcher.Dispatcher)]
ours = [kernel for kernel in kernels if kernel.py_func.__module__.startswith("kvstore")]
assert ours and not any(d.overloads for d in ours)
"""
    python(code, KVSTORE_JIT_CACHE=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_no_kernel_uses_all_of_fast_math() -> None:
    assert len(SOURCES) > 20
    for path in SOURCES:
        assert "fastmath=True" not in path.read_text(), path


def test_every_public_name_can_be_imported() -> None:
    for name in kvstore.index.__all__:
        assert getattr(kvstore.index, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = kvstore.index.nothing  # type: ignore[attr-defined]


KERNEL = """
import numpy as np
from kvstore.index.jit import jit
@jit
def callee(x):
    return x * {factor}
def factory(size, inner):
    @jit
    def kernel(x):
        total = 0.0
        for i in range(size):
            total += inner(x[i])
        return total
    return kernel
kernel = factory(3, callee)
print(kernel(np.ones(8)), sum(kernel.stats.cache_hits.values()))
"""


def test_kernels_are_stored_and_a_changed_callee_is_noticed(tmp_path: Path) -> None:
    here = str(tmp_path)
    assert python(KERNEL.format(factor="2.0"), KVSTORE_JIT_CACHE=here) == "6.0 0"
    assert python(KERNEL.format(factor="2.0"), KVSTORE_JIT_CACHE=here) == "6.0 1"
    assert python(KERNEL.format(factor="5.0"), KVSTORE_JIT_CACHE=here) == "15.0 0"
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(b"\x80")  # torn files are misses
    assert python(KERNEL.format(factor="2.0"), KVSTORE_JIT_CACHE=here) == "6.0 0"


def test_kernels_work_where_nothing_can_be_stored(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    assert python(KERNEL.format(factor="2.0"), KVSTORE_JIT_CACHE=str(file)) == "6.0 0"
    assert python(KERNEL.format(factor="2.0"), KVSTORE_JIT_CACHE="off") == "6.0 0"


def test_directory_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_JIT_CACHE", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_directory()
    assert path == tmp_path / "kvstore" / "kernels"
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o777)  # anybody could put code there
    assert cache_directory() is None


def test_a_failing_disk_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KernelCache, "_open", full)

    @jit
    def double(x: Any) -> Any:
        return 2 * x

    assert double(4) == 8


@dataclass(frozen=True)
class Sizes:
    """What a factory may hand to its kernel in one piece."""

    n: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2), (1.5, 2.5), (np.float32(1), np.float32(2)), (np.ones(3), np.zeros(3)), ((1, 2), (1, 3)),
        (Sizes(1), Sizes(2)), ({1: "a"}, {1: "b"}), ([1, 2], [2, 1]), (frozenset("ab"), frozenset("ac")),
        (int, float), (complex(1, 2), complex(1, 3)), (object(), object()),
    ],
)  # fmt: skip
def test_fingerprints_see_constants(one: Any, other: Any) -> None:
    def make(constant: Any) -> Any:
        def kernel(x: Any) -> Any:
            return x + constant

        return kernel

    assert fingerprint(make(one)) == fingerprint(make(one))
    assert fingerprint(make(one)) != fingerprint(make(other))
    assert fingerprint(make(one), "a") != fingerprint(make(one), "b")


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        index = PQIndex(2, 16)
        index.train(normal(2, 300, 16))
        with kernel_threads(1):
            index.add(normal(2, 300, 16))
        index.search(normal(2, 3, 16), 4, scale=1.0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_kernel_threads_are_restored() -> None:
    before = numba.get_num_threads()
    with pytest.raises(RuntimeError), kernel_threads(1):
        assert numba.get_num_threads() == 1
        raise RuntimeError
    with kernel_threads(10_000):
        assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
    assert numba.get_num_threads() == before


def test_two_python_threads_search_two_indexes() -> None:
    indexes, expected = [], []
    q = normal(2, 3, 16)
    for seed in (1, 2):
        index = PQIndex(2, 16)
        index.train(normal(2, 3000, 16, seed=seed))
        index.add(normal(2, 3000, 16, seed=seed))
        indexes.append(index)
        expected.append(index.search(q, 300, scale=0.25))
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(30):
            found = indexes[number].search(q, 300, scale=0.25)
            if not (found.rows == expected[number].rows).all() or (found.scores != expected[number].scores).any():
                wrong.append(f"index {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_run_parallel_returns_what_the_kernel_returns() -> None:
    @jit(parallel=True)
    def total(x: Any) -> Any:
        result = 0.0
        for i in numba.prange(x.shape[0]):
            result += x[i]
        return result

    assert run_parallel(total, np.ones(10)) == 10


_FACTORY = """
import sys
import numpy as np
from kvstore.index.jit import jit

def adder(step):
    @jit
    def add(x):
        return x + step

    return add

print([int(adder(int(step))(np.int64(1))) for step in sys.argv[1:]])
"""


def test_kernels_of_one_factory_stored_by_two_processes_have_two_names(tmp_path: Path) -> None:
    """Of two stored kernels with one symbol, a process that loads both runs one for the other."""

    def run(*steps: int) -> str:
        command = [sys.executable, "-c", _FACTORY, *map(str, steps)]
        environment = {**os.environ, "KVSTORE_JIT_CACHE": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert run(1) == "[2]"
    assert run(5) == "[6]"
    stored = [pickle.loads(path.read_bytes()) for path in tmp_path.rglob("*.nbc")]
    assert len({descriptor.llvm_func_name for _, descriptor, *_ in stored}) == len(stored) == 2
    assert run(5, 1) == "[6, 2]"
