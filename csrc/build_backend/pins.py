"""The versions this project asks for, read from pyproject.toml so that each is written once."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def _toml_reader() -> Any:
    """tomllib; on Python 3.10, which has none, the copy that setuptools or pip carries."""
    for name in ("tomllib", "setuptools._vendor.tomli", "pip._vendor.tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise SystemExit("no TOML reader found; mend: python3 -m pip install 'setuptools>=77.0.3,<82'")


@cache
def pyproject() -> dict[str, Any]:
    return _toml_reader().loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pin(name: str) -> str:
    """One entry of [tool.flash_ext], e.g. ``pin("torch")`` is "2.13.0"."""
    return pyproject()["tool"]["flash_ext"][name]


def as_numbers(version: str) -> tuple[int, ...]:
    """Leading numeric parts of a version: "2.13.0+cpu" is (2, 13, 0), "2.16.0.dev1" is (2, 16, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def torch_requirement() -> str:
    return f"torch=={pin('torch')}"


def toolkit_requirement(beside: str | None = None) -> str:
    """nvcc and what it needs, as one metapackage that pins all pieces to one release.

    Naming nvidia-cuda-nvcc alone lets pip pair it with a newer nvvm whose PTX its ptxas cannot read.

    Args:
        beside: the torch requirement that is installed with it. A CUDA build of torch pins the metapackage
            itself, down to the patch release, so that much is left to it.
    """
    version = pin("cuda-toolkit")
    if beside is not None:
        kept = 2 if beside == torch_requirement() else 1
        version = ".".join(version.split(".")[:kept]) + ".*"
    return f"cuda-toolkit[nvcc,nvvm,crt,cccl,cudart,nvtx]=={version}"
