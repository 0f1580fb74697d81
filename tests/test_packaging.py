"""The wheel: what is in it, and that it works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).resolve().parents[1]
CHECKED_OUT = ("pyproject.toml", "README.md", "LICENSE", "kvstore", "index", "buffer_pool", "adapters")
JUNK = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    before = {path.name for path in ROOT.iterdir()}
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in CHECKED_OUT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=JUNK)
        else:
            shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), ".", cwd=source)
    [path] = out.glob("*.whl")
    assert not {"build", "dist", "kvstore_engine.egg-info"} & {path.name for path in ROOT.iterdir()} - before
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the installed package and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(target))
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=target)
    return target


def python(installed: Path, code: str, tmp_path: Path) -> str:
    """Run code beside the installed package and what it depends on; no .pth file may lead to the checkout."""
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return run(sys.executable, "-S", "-P", "-c", code, cwd=tmp_path, PYTHONPATH=path)


def files_of_the_checkout() -> set[str]:
    """Every file of the packages as the wheel should name it."""
    names = set()
    for place, folders, files in os.walk(ROOT / "kvstore", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        names |= {str(Path(place, name).relative_to(ROOT)) for name in files if not name.endswith(".pyc")}
    return names


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == files_of_the_checkout()
    assert {"kvstore/py.typed", "kvstore/index/base.py", "kvstore/kernels/attend.py"} <= package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_is_pure_and_names_its_command(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "kvstore = kvstore.cli:main" in archive.read(entry_points).decode()


def modules_of_the_checkout() -> list[str]:
    modules = [name.removesuffix(".py").replace("/", ".") for name in files_of_the_checkout() if name.endswith(".py")]
    return sorted(name.removesuffix(".__init__") for name in modules)


IMPORT = """
import importlib, sys
for name in {names}:
    print(name, importlib.import_module(name).__file__)
"""


def assert_imports_come_from(installed: Path, names: list[str], printed: str) -> None:
    found = dict(line.split(" ", 1) for line in printed.splitlines())
    assert sorted(found) == names
    assert all(Path(path).is_relative_to(installed) for path in found.values())


@pytest.mark.slow
@pytest.mark.hf
def test_every_module_of_the_wheel_can_be_imported_without_the_checkout(installed, tmp_path):
    names = modules_of_the_checkout()
    assert {"kvstore.cli.app", "kvstore.adapters.hf"} <= set(names)
    assert_imports_come_from(installed, names, python(installed, IMPORT.format(names=names), tmp_path))


def test_the_engine_of_the_wheel_answers_queries_without_the_checkout(installed, tmp_path):
    others = ("kvstore.adapters.", "kvstore.demo", "kvstore.cli")  # these may need what is not always there
    names = [name for name in modules_of_the_checkout() if not name.startswith(others)]
    assert {"kvstore.store", "kvstore.index.base", "kvstore.buffer_pool", "kvstore.adapters"} <= set(names)
    code = """
import torch
from kvstore import KVStore, Schema
store = KVStore(Schema(n_layers=1, n_q_heads=2, n_kv_heads=1, head_dim=16))
seq = store.create("book")
with seq.step():
    seq.append(0, torch.eye(16)[None], torch.eye(16)[None])
hits = store.topk(0, 0, torch.arange(16.0), k=3)
assert hits.positions.tolist() == [15, 14, 13]
assert hits.scores.tolist() == [15.0, 14.0, 13.0]
assert seq.attend(0, torch.ones(2, 16)).shape == (2, 16)
"""
    assert_imports_come_from(installed, names, python(installed, IMPORT.format(names=names) + code, tmp_path))


def test_the_command_of_the_wheel_tells_its_version(installed, tmp_path):
    code = "import sys; sys.argv = ['kvstore', '--version']; from kvstore.cli import main; main()"
    assert kvstore.__version__ in python(installed, code, tmp_path)
