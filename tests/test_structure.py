"""Who may know whom, and what happens at import: nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = ("index", "buffer_pool", "adapters")  # in kvstore/ they are links
FRAMEWORKS = {"transformers", "gguf", "safetensors", "tokenizers", "accelerate", "vllm", "sglang", "lmcache"}
PUBLIC = [
    "BlockNotFoundError",
    "ConfigError",
    "CorruptBlockError",
    "CorruptStoreError",
    "Explanation",
    "ForkedStoreError",
    "HeapFullError",
    "IndexConfig",
    "IndexNotTrainedError",
    "InvalidQueryError",
    "KVStore",
    "KVStoreError",
    "LayerNotFoundError",
    "MaintenanceError",
    "NonFiniteError",
    "ReadOnlyStoreError",
    "RopeSpec",
    "Schema",
    "SchemaMismatchError",
    "Sequence",
    "SequenceExistsError",
    "SequenceNotFoundError",
    "SpillFullError",
    "StepError",
    "StorageError",
    "StoreClosedError",
    "StoreConfig",
    "StoreLockedError",
    "StoreStats",
    "TopK",
    "UnsupportedFormatError",
    "UnsupportedModelError",
    "warmup",
]


def sources() -> dict[str, Path]:
    """Every module of the package by its import name, once."""
    found = {}
    for folder, name in [(ROOT / "kvstore", "kvstore"), *((ROOT / top, f"kvstore.{top}") for top in TOP_LEVEL)]:
        for path in walk(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


def walk(folder: Path) -> Iterator[Path]:
    """Python files under a folder, links not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(place, name) for name in files if name.endswith(".py"))


SOURCES = sources()
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imports(name: str) -> set[str]:
    """Modules that a module names in import statements, wherever they stand; `from a import b` names a and a.b."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def modules_in(*packages: str) -> list[str]:
    return [name for name in SOURCES if any(inside(name, package) for package in packages)]


def engine() -> list[str]:
    """The store itself: no index, pool, adapters, chat, command line or demo."""
    others = modules_in("kvstore.chat", "kvstore.cli", "kvstore.demo", *(f"kvstore.{top}" for top in TOP_LEVEL))
    return [name for name in SOURCES if name not in others]


def offenders(names: list[str], forbidden: set[str], allowed: set[str] = frozenset()) -> list[str]:
    return [
        f"{name} imports {module}"
        for name in names
        for module in sorted(imports(name))
        if any(inside(module, bad) for bad in forbidden) and not any(inside(module, good) for good in allowed)
    ]


@pytest.mark.parametrize("package", ["kvstore.index", "kvstore.buffer_pool"])
def test_index_and_pool_know_neither_each_other_nor_the_store(package):
    assert modules_in(package)
    for name in modules_in(package):
        own = {module for module in imports(name) if inside(module, "kvstore") and not inside(module, package)}
        assert all(inside(module, "kvstore.errors") for module in own - {"kvstore"}), (name, own)
        assert "kvstore" not in own, f"{name} imports the whole package"


def test_the_store_knows_no_adapter_no_chat_no_command_line_and_no_demo():
    assert "kvstore.store" in engine()
    assert offenders(engine(), {"kvstore.adapters", "kvstore.chat", "kvstore.cli", "kvstore.demo"}) == []


def test_adapters_know_neither_chat_nor_command_line_nor_demo():
    assert offenders(modules_in("kvstore.adapters"), {"kvstore.chat", "kvstore.cli", "kvstore.demo"}) == []


def test_chat_knows_neither_command_line_nor_demo_nor_what_they_print_with():
    assert modules_in("kvstore.chat")
    assert offenders(modules_in("kvstore.chat"), {"kvstore.cli", "kvstore.demo", "typer", "rich"}) == []


def test_only_adapters_command_line_and_demo_know_a_model_framework():
    free = modules_in("kvstore.adapters", "kvstore.cli", "kvstore.demo")
    assert offenders([name for name in SOURCES if name not in free], FRAMEWORKS) == []


def test_at_most_one_module_knows_lmdb():
    assert len([name for name in SOURCES if any(inside(m, "lmdb") for m in imports(name))]) <= 1


def test_nobody_imports_the_folders_by_their_place_in_the_checkout():
    assert offenders(list(SOURCES), {*TOP_LEVEL, "tests", "benchmarks"}) == []


def test_no_module_pickles_but_the_cache_of_compiled_kernels():
    known = {"kvstore.index.jit_cache"}
    assert offenders([n for n in SOURCES if n not in known], {"pickle", "marshal", "shelve", "dill"}) == []


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_fast_math_is_always_a_list_of_what_may_be_assumed():
    """fastmath=True would let the compiler assume that there is no NaN and no infinity."""
    for name, tree in TREES.items():
        for call in calls(tree):
            for keyword in call.keywords:
                is_bare = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (keyword.arg == "fastmath" and is_bare), f"{name}:{call.lineno}"
    from kvstore.index.jit import FASTMATH, STRICT

    assert not (FASTMATH | STRICT) & {"nnan", "ninf", "fast", "arcp", "afn"}


def test_kernels_are_compiled_in_one_place():
    compilers = {"njit", "jit", "vectorize", "guvectorize", "cfunc", "stencil"}
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("numba", "nb"):
                assert node.attr not in compilers or name == "kvstore.index.jit", f"{name}:{node.lineno}"
        named = {module for module in imports(name) if module.partition(".")[0] == "numba"}
        assert not named & {f"numba.{compiler}" for compiler in compilers}, name


# ---- names and packages ----


def test_the_public_names_are_these():
    assert kvstore.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(kvstore, name).__name__ == name
    assert set(PUBLIC) <= set(dir(kvstore))
    with pytest.raises(AttributeError, match="has no attribute 'KVStor'"):
        _ = kvstore.KVStor


def test_the_packages_in_pyproject_are_those_on_disk():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert set(settings["packages"]) == packages
    assert len(settings["packages"]) == len(packages)
    folders = {name: (ROOT / folder).resolve() for name, folder in settings["package-dir"].items()}
    assert set(folders) >= {"kvstore", *(f"kvstore.{top}" for top in TOP_LEVEL)}
    assert folders == {name: SOURCES[name].parent for name in folders}


def test_every_folder_with_modules_is_a_package():
    for path in SOURCES.values():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_package_sees_the_top_level_folders_through_links(name):
    link = ROOT / "kvstore" / name
    assert link.is_symlink()
    assert Path(os.readlink(link)) == Path("..", name)
    assert (ROOT / name / "__init__.py").exists()


def test_the_version_is_said_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kvstore.__version__ == project["version"]


# ---- at import ----


def in_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, kvstore, kvstore.cli; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in in_fresh_process(code).split()}
    assert not loaded & {"torch", "numba", "numpy", "scipy", "typer", "rich", "lmdb", *FRAMEWORKS}


def test_importing_every_module_of_the_engine_starts_no_thread_and_compiles_nothing():
    names = [*engine(), *modules_in("kvstore.index", "kvstore.buffer_pool")]
    code = f"""
import os, sys, importlib, threading, torch, numba
from numba.core import event
threads, before = len(os.listdir("/proc/self/task")), torch.get_num_threads()
with event.install_recorder("numba:compile") as compiled:
    for name in {names!r}:
        importlib.import_module(name)
assert not compiled.buffer, compiled.buffer
assert len(os.listdir("/proc/self/task")) == threads
assert threading.active_count() == 1
assert torch.get_num_threads() == before
print(*sys.modules)
"""
    loaded = {name.partition(".")[0] for name in in_fresh_process(code).split()}
    assert not loaded & FRAMEWORKS


def test_the_recorder_of_compilations_would_see_one():
    code = """
import numpy as np
from numba.core import event
from kvstore.index.jit import jit
with event.install_recorder("numba:compile") as compiled:
    assert jit(cache=False)(lambda x: x + 1)(1) == 2
print(len(compiled.buffer))
"""
    assert int(in_fresh_process(code)) > 0
