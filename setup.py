"""Builds the extension module flash_ext._C; how, is in csrc/build_backend/, the rest in pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

from build_backend import cache, compile, environment, pins, published  # noqa: E402

VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "flash_ext/__init__.py").read_text(), re.M).group(1)


def place(build: Callable[[str], Path], target: Path) -> None:
    """Builds a library and copies it to ``target``; ends the program, in words, where it cannot be built."""
    try:
        module = build(VERSION)
    except (environment.BuildProblem, compile.GateFailure) as problem:
        raise SystemExit(f"\n{problem}") from None
    except subprocess.CalledProcessError:
        raise SystemExit("\nflash_ext did not compile; the compiler's words are above") from None
    cache.place(module, target)


class BuildKernels(build_ext):
    """build_ext by one ninja graph, which times, logs and gates every kernel."""

    def build_extension(self, ext: Extension) -> None:
        place(compile.build_extension, Path(self.get_ext_fullpath(ext.name)))


class BuildLadder(Command):
    """Builds the kernels of examples/ladder, which are in that graph and in no package."""

    description = "build the kernels of examples/ladder"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        place(compile.build_ladder, ROOT / "examples/ladder/kernels/ladder.so")


class CopyPackage(build_py):
    """build_py into an empty folder: modules deleted since the last build must not reach a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "flash_ext", ignore_errors=True)
        super().run()


def dependencies() -> list[str]:
    """torch of the very minor release that is built against: C++ extensions do not load in another."""
    torch = None if "sdist" in sys.argv[1:] else environment.find_torch()
    return [f"torch=={torch.minor}.*" if torch else f"torch>={pins.pin('torch-minimum')}"]


setup(
    version=VERSION,
    install_requires=dependencies(),
    project_urls=published.links(pins.pin("repository")),
    long_description=published.description((ROOT / "README.md").read_text("utf-8"), pins.pin("repository")),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("flash_ext._C", sources=[])],
    cmdclass={"build_ext": BuildKernels, "build_ladder": BuildLadder, "build_py": CopyPackage},
)
