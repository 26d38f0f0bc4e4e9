"""Finds and loads the extension module ``flash_ext._C``, or says which command mends that it does not load.

It lies beside this file. Python that is started in the source folder takes the package from there, where a
module may be missing, older than the sources, or built by ``make`` for the torch of .venv. The module of the
installed package then serves, if it was built from the same sources.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
PREPARED = "flash_ext-requirements.json"  # csrc/build_backend/prepare.py leaves it in what it has filled


class MissingExtension:
    """Stands in for ``_C`` when it cannot be loaded: every use raises, and says why and what mends it."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __getattr__(self, name: str) -> Any:
        raise ImportError(self.message)


def load(package: Path = PACKAGE) -> ModuleType | MissingExtension:
    """The first module that fits this torch and, where it is the installed one, the sources here."""
    own, (installed, why_not) = module_in(package), installed_module(package)
    refused = [] if own else [f"the extension module flash_ext._C has not been built here, in {package}"]
    files = [file for file in (own, installed) if file]
    if own and installed and build_record(own).get("sources") != build_record(installed)["sources"]:
        files.reverse()  # the sources have changed since the one beside them was built
    for file in files:
        try:
            return load_file(file)
        except ImportError as error:
            refused.append(str(error))
    refused += [why_not] if why_not else []
    return MissingExtension(f"{'; '.join(refused)}. Build it for this torch: {mend(package)}")


def module_in(package: Path) -> Path | None:
    """The module's file for this Python."""
    files = (package / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def installed_module(package: Path) -> tuple[Path | None, str]:
    """What an installed package has for a source folder, and why it has none; outside of one neither."""
    if not in_source_folder(package):
        return None, ""
    why_not = "no package is installed"
    for distribution in importlib.metadata.distributions(name="flash_ext"):
        folder = Path(str(distribution.locate_file("flash_ext"))).resolve()
        file = module_in(folder)
        if file is None or folder == package:  # the latter is what a build leaves beside the sources
            continue
        if is_of_sources_beside(package, file):
            return file, ""
        why_not = f"the installed {file} was built from other sources"
    return None, why_not


def in_source_folder(package: Path) -> bool:
    return hash_program(package).is_file()


def hash_program(package: Path) -> Path:
    return package.parent / "csrc" / "build_backend" / "sources.py"


def is_of_sources_beside(package: Path, file: Path) -> bool:
    """Whether a module was built from the sources of this source folder."""
    content_hash = runpy.run_path(str(hash_program(package)))["content_hash"]
    sources: str = content_hash(package.parent / "csrc")
    return build_record(file).get("sources") == sources


def build_record(file: Path) -> dict[str, str]:
    """What a module was built from and for, read without loading it."""
    content, mark = file.read_bytes(), b"flash_ext build record: "
    start = content.find(mark)
    return json.loads(content[start + len(mark) : content.index(b"\n", start)]) if start >= 0 else {}


def load_file(file: Path) -> ModuleType:
    """Loads a module as ``flash_ext._C``.

    Raises:
        ImportError: it belongs to another torch, or the loader refuses it.
    """
    built = build_record(file).get("torch", torch.__version__)
    another = f"flash_ext._C was built for torch {built}, but this is torch {torch.__version__}"
    # Of another minor release a module finds no symbol, or one that means something else.
    if built.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"{another} ({file})")
    package = __package__.partition(".")[0]
    name = f"{package}._C"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        state = "flash_ext._C does not load" if built == torch.__version__ else another
        raise ImportError(f"{state}: {error} ({file})") from error
    sys.modules[name] = module
    setattr(sys.modules[package], "_C", module)  # noqa: B010  (as an import does)
    return module


def mend(package: Path = PACKAGE) -> str:
    """The command after which a module loads: of ``make`` for the environment that it made, else pip's."""
    pip = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps"
    if not in_source_folder(package):
        return f"{pip} . in the source folder"
    root = package.parent
    if Path(sys.prefix) == root / ".venv" and (Path(sys.prefix) / PREPARED).is_file():
        return f"make -C {shlex.quote(str(root))} build"
    return f"{pip} {shlex.quote(str(root))}"
