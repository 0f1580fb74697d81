"""Compiled kernels on disk.

Numba's own cache sits next to the source and looks only at one file: it fails where no directory can be
written, does not notice that a callee in another file has changed, and never hits for a kernel that closes
over another kernel. This one sits in the user's cache directory and its key holds everything a kernel is made
of: the bytecode, constants and globals of the function and, recursively, of each function that it calls.

The files are pickles, to be trusted like code: the directory is private (mode 0700) and used only when it
belongs to this user.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler import CompileResult

FORMAT = 3
"""Of what is stored; raised when files written before must not be read any more."""

ENV_DIRECTORY = "KVSTORE_JIT_CACHE"
"""Environment variable: a directory for compiled kernels, or `off`."""


_TORN = (EOFError, pickle.UnpicklingError, ValueError, AttributeError, ImportError, IndexError, KeyError)
"""What unpickling a damaged file may raise."""


def cache_directory() -> Path | None:
    """Return the private directory of compiled kernels, made if need be, or None if there can be none."""
    chosen = os.environ.get(ENV_DIRECTORY) or os.environ.get("NUMBA_CACHE_DIR")
    if chosen is not None and chosen.lower() in ("off", "0", "none"):
        return None
    try:
        base = Path(chosen) if chosen else _user_cache() / "kvstore"
        path = base / "kernels"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = path.stat()
        foreign = hasattr(os, "geteuid") and state.st_uid != os.geteuid()
        if foreign or state.st_mode & stat.S_IWOTH or not os.access(path, os.W_OK | os.X_OK):
            return None
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    return path


def _user_cache() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME")
    return Path(configured) if configured else Path.home() / ".cache"


def fingerprint(function: Callable[..., Any], options: object = ()) -> str:
    """Return a digest of a kernel: its code, the values it closes over, and the same of each callee."""
    digest = hashlib.sha256(repr((FORMAT, options)).encode())
    _absorb_function(function, digest, set())
    return digest.hexdigest()[:32]


def _absorb_function(function: Any, digest: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    _absorb_code(function.__code__, digest)
    digest.update(repr(function.__defaults__).encode())
    for cell in function.__closure__ or ():
        _absorb_value(cell.cell_contents, digest, seen)
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            digest.update(name.encode())
            _absorb_value(function.__globals__[name], digest, seen)


def _absorb_code(code: CodeType, digest: Any) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _absorb_code(constant, digest)
        else:
            digest.update(repr(constant).encode())


def _absorb_value(value: Any, digest: Any, seen: set[int]) -> None:
    inner = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    if isinstance(inner, FunctionType):
        if hasattr(value, "targetoptions"):
            digest.update(_stable(value.targetoptions).encode())
        if (inner.__module__ or "").partition(".")[0] not in ("numba", "numpy", "llvmlite"):
            _absorb_function(inner, digest, seen)
    elif isinstance(value, np.ndarray):  # a global array is a constant to Numba
        digest.update(repr((value.shape, value.dtype)).encode() + value.tobytes())
    elif isinstance(value, (set, frozenset)):
        digest.update(repr(sorted(map(repr, value))).encode())  # a set prints in an order that hash seeds pick
    elif not isinstance(value, ModuleType):
        # What prints an address matches nothing in another process: compiled again, rather than taken for another.
        digest.update(repr(value).encode())


def _stable(options: dict[str, Any]) -> str:
    """Text of compile options, the same in each process (a set prints in an order that hash seeds pick)."""
    return repr(sorted((k, sorted(v) if isinstance(v, (set, frozenset)) else v) for k, v in options.items()))


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


class KernelCache:
    """What a Numba dispatcher asks for compiled code; a miss, never an error, when the disk says no."""

    def __init__(self, function: Callable[..., Any], options: object) -> None:
        self._function = function
        self._options = options
        self._place: tuple[str, str] | None = None  # directory and beginning of file names
        self._opened = False

    @property
    def cache_path(self) -> str | None:
        """Directory in use, or None."""
        directory = cache_directory()
        return str(directory) if directory else None

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the stored compile result for these argument types, or None."""
        target.refresh()
        try:
            self._open()  # also before anything is compiled: it names the function
            key = self._key(signature, target.codegen())
            file = self._file(key)
            data = file.load(key) if file else None
            return None if data is None else CompileResult._rebuild(target, *data)
        except (OSError, *_TORN):
            return None  # compile again

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store a compile result; a full or read-only disk only means that it is not stored."""
        if result.library.has_dynamic_globals or any(not loop.can_cache for loop in result.lifted):
            return  # holds addresses of this process
        try:
            key = self._key(signature, result.codegen)
            file = self._file(key)
            if file:
                self._save(file, key, result._reduce())
        except OSError:
            return

    def enable(self) -> None:
        """Do nothing: the environment decides."""

    def disable(self) -> None:
        """Stop using the disk for this kernel."""
        self._place, self._opened = None, True

    def flush(self) -> None:
        """Forget what is stored for this kernel."""
        self._open()
        if self._place:
            directory, name = self._place
            for path in Path(directory).glob(f"{name}-*"):
                path.unlink(missing_ok=True)

    @staticmethod
    def _save(file: Any, key: Any, data: Any) -> None:
        try:
            file.save(key, data)
        except _TORN:  # the list of what is stored cannot be read: begin a new one
            file.flush()
            file.save(key, data)

    def _open(self) -> None:
        """Find the place on disk, once, and name the function by its content.

        Numba names compiled symbols by qualified name and a count that starts anew in each process. Two kernels out of
        one factory, stored by two processes, may so bear one name, and a third process that loads both would run one
        for the other. With the content in the name that cannot be.
        """
        if self._opened:
            return
        self._opened = True
        directory = cache_directory()
        if directory is not None:
            content = fingerprint(self._function, self._options)
            self._place = str(directory), f"{self._function.__name__}-{content}"
            self._function.__qualname__ += "_" + content

    def _file(self, key: tuple[Any, ...]) -> Any:
        """Files of one overload: Numba's numbering of many in one list is not safe with two writers."""
        self._open()
        if self._place is None:
            return None
        directory, name = self._place
        overload = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return IndexDataCacheFile(directory, f"{name}-{overload}", source_stamp=name)

    @staticmethod
    def _key(signature: Any, codegen: Any) -> tuple[Any, ...]:
        return signature, codegen.magic_tuple()
