"""Whether code compiles kernels, told by a process of its own that has compiled nothing else."""

import os
import subprocess
import sys

import pytest

_COUNT = """
import gc
import numpy as np
from numba.core import dispatcher

def compiled():
    kernels = [d for d in gc.get_objects() if isinstance(d, dispatcher.Dispatcher)]
    return {(d.py_func.__module__, d.py_func.__qualname__, id(d), str(s)) for d in kernels for s in d.signatures}

def begin():
    global before
    before = compiled()
    assert before

rng = np.random.default_rng(0)
def normal(*shape):
    return rng.standard_normal(shape, np.float32)
"""
_COMPARE = """
assert compiled() == before, sorted(compiled() - before)
"""


def assert_compiles_nothing(code: str) -> None:
    """Run code that calls `begin()` once everything should be compiled; it may use `np` and `normal(*shape)`."""
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        pytest.skip("nothing is compiled")
    program = _COUNT + code + _COMPARE
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
