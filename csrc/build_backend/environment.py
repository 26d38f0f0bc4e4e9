"""Finds what a build needs: torch, a CUDA 13 toolkit, a host compiler, Python's headers, ninja.

Nothing here imports torch: its version is read from its files, so that a broken or foreign torch still ends
in a message. Whatever is missing or does not match raises BuildProblem, which says what was found, what is
needed, and the command that mends it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .pins import as_numbers, pin, toolkit_requirement, torch_requirement


class BuildProblem(Exception):
    """A piece of the build environment is missing or does not match.

    Args:
        what: the problem in a few words, e.g. "no torch that fits".
        found, needed, mend: one line each; ``mend`` is a command.
    """

    def __init__(self, what: str, found: str, needed: str, mend: str) -> None:
        super().__init__(
            f"flash_ext cannot be built: {what}.\n  found:  {found}\n  needed: {needed}\n  mend:   {mend}"
        )


# ---------------------------------------------------------------- where packages may lie


def target_site_dirs() -> list[Path]:
    """Site directories of the environment that will run flash_ext.

    Inside pip's isolated build they are not on sys.path, but the build runs on the target's interpreter, so
    sysconfig still names them. Front ends that build in an environment of their own hide the target.
    """
    found = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    config = Path(sys.prefix) / "pyvenv.cfg"
    isolated_venv = sys.prefix != sys.base_prefix and not (
        config.is_file() and re.search(r"include-system-site-packages\s*=\s*true", config.read_text(), re.I)
    )
    if not isolated_venv:
        base = {
            "base": sys.base_prefix,
            "platbase": sys.base_prefix,
            "installed_base": sys.base_prefix,
            "installed_platbase": sys.base_prefix,
        }
        found += [
            sysconfig.get_path("platlib", vars=base),
            site.getusersitepackages(),
            "/usr/lib/python3/dist-packages",
        ]
    return [Path(item) for item in dict.fromkeys(found)]


def package_dirs() -> list[Path]:
    """Directories that may hold packages for this build, most specific first."""
    return list(dict.fromkeys([*(Path(item) for item in sys.path if item), *target_site_dirs()]))


# ---------------------------------------------------------------- torch


@dataclass(frozen=True)
class TorchInstall:
    """A torch found on disk. ``cuda`` is the CUDA it was built with, None for a CPU-only build."""

    root: Path
    version: str
    cuda: str | None
    hip: str | None

    @property
    def minor(self) -> str:
        return ".".join(str(part) for part in as_numbers(self.version)[:2])


def find_torch() -> TorchInstall | None:
    for folder in package_dirs():
        if (folder / "torch" / "version.py").is_file():
            return read_torch(folder / "torch")
    spec = importlib.util.find_spec("torch")  # an editable torch lies in no site directory
    if spec is not None and spec.origin and (Path(spec.origin).parent / "version.py").is_file():
        return read_torch(Path(spec.origin).parent)
    return None


def read_torch(root: Path) -> TorchInstall:
    values: dict[str, str] = {}
    for node in ast.parse((root / "version.py").read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            values[target.id] = value.value
    return TorchInstall(root, values.get("__version__") or "0", values.get("cuda"), values.get("hip"))


def check_torch(torch: TorchInstall | None) -> TorchInstall:
    """The torch, if an extension for it can be built here.

    Raises:
        BuildProblem: no torch, one before the minimum, or one built for CUDA 12, ROCm or another platform.
    """
    minimum = pin("torch-minimum")
    needed = f"torch {minimum} or newer, built for CUDA 13 or for the CPU only"
    mend = f'python -m pip install "{torch_requirement()}"'
    if torch is None:
        raise BuildProblem("no torch that fits", f"none for {sys.executable}", needed, mend)
    if (
        as_numbers(torch.version) < as_numbers(minimum)
        or torch.hip
        or (torch.cuda and as_numbers(torch.cuda)[0] != 13)
    ):
        target = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "the CPU only"
        found = f"torch {torch.version}, built for {target}, in {torch.root}"
        raise BuildProblem("no torch that fits", found, needed, mend)
    return torch


# ---------------------------------------------------------------- CUDA toolkit


@dataclass(frozen=True)
class Toolkit:
    """A usable CUDA toolkit: nvcc, its headers and the runtime library to link."""

    home: Path
    version: str
    cudart: Path

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def include_dirs(self) -> list[Path]:
        # nvcc adds cccl by itself; a host compiler that meets <nv/target> or <cuda/std/...> does not.
        return [item for item in (self.home / "include", self.home / "include" / "cccl") if item.is_dir()]


def find_toolkit() -> tuple[Toolkit | None, list[str]]:
    """The first toolkit that can build flash_ext, and why each one before it cannot."""
    refused: list[str] = []
    seen = set()
    for folder in _toolkit_candidates():
        folder = _home_of_nvcc(folder / "bin" / "nvcc") or folder
        if folder in seen:
            continue
        seen.add(folder)
        toolkit = inspect_toolkit(folder)
        if isinstance(toolkit, Toolkit):
            return toolkit, refused
        refused.append(f"{folder}: {toolkit}")
    return None, refused


def check_toolkit() -> Toolkit:
    toolkit, refused = find_toolkit()
    if toolkit is None:
        raise BuildProblem(
            "no CUDA toolkit that fits",
            "; ".join(refused) or "no nvcc",
            "a complete CUDA 13 toolkit, 13.0 or newer",
            f'python -m pip install "{toolkit_requirement()}" (or set CUDA_HOME)',
        )
    return toolkit


def _toolkit_candidates() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path).parents[1]
    yield from (
        item
        for item in (Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-13*")))
        if item.is_dir()
    )
    if os.environ.get("CONDA_PREFIX"):
        yield Path(os.environ["CONDA_PREFIX"])
    for folder in package_dirs():
        # Every CUDA build of torch has this directory, mostly without an nvcc in it.
        if (folder / "nvidia" / "cu13" / "bin" / "nvcc").is_file():
            yield folder / "nvidia" / "cu13"


@cache
def _home_of_nvcc(nvcc: Path) -> Path | None:
    """The toolkit an nvcc belongs to by its own account: the one on PATH may be a wrapper script."""
    match = re.search(r"TOP=(.+)", _output([str(nvcc), "--dryrun", "none.cu"]))
    return Path(match.group(1).strip()).resolve() if match else None


def inspect_toolkit(home: Path) -> Toolkit | str:
    """The toolkit in ``home``, or why it is of no use."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return "no bin/nvcc"
    release = re.search(r"release (\d+)\.(\d+)", _output([str(nvcc), "--version"]))
    if release is None:
        return "nvcc --version says no release"
    version = f"{release.group(1)}.{release.group(2)}"
    if release.group(1) != "13":
        return f"nvcc is {version}, CUDA 13 is needed"
    include = next(
        (
            item
            for item in (home / "include", *home.glob("targets/*-linux/include"))
            if (item / "cuda_runtime.h").is_file()
        ),
        None,
    )
    if include is None:
        return "include/cuda_runtime.h is missing (cudart package)"
    if not (include / "crt" / "host_config.h").is_file():
        return "include/crt is missing (crt package)"
    if not any((item / "nv" / "target").is_file() for item in (include, include / "cccl")):
        return "include/nv/target is missing (cccl package)"
    cicc = next((item for item in home.glob("nvvm*/bin/cicc")), None)
    if cicc is None:
        return "nvvm/bin/cicc is missing (nvvm package)"
    for piece, found in (("the headers", _header_version(include)), ("cicc", _cicc_version(cicc))):
        if found not in (None, version):
            return f"nvcc is {version} but {piece} are of {found}: the pieces must be of one release"
    cudart = _find_cudart(home)
    if cudart is None:
        return "neither libcudart_static.a nor libcudart.so.13 is there (cudart package)"
    return Toolkit(home, version, cudart)


def _header_version(include: Path) -> str | None:
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", (include / "cuda_runtime_api.h").read_text())
    return f"{int(match.group(1)) // 1000}.{int(match.group(1)) % 1000 // 10}" if match else None


def _cicc_version(cicc: Path) -> str | None:
    match = re.search(r"release (\d+\.\d+)", _output([str(cicc), "--version"]))
    return match.group(1) if match else None


def _find_cudart(home: Path) -> Path | None:
    """The static runtime where it is shipped: then the module needs no libcudart at run time."""
    folders = [home / "lib64", home / "lib", *home.glob("targets/*-linux/lib")]
    for name in ("libcudart_static.a", "libcudart.so.13"):
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
    return None


# ---------------------------------------------------------------- host tools

NEWEST_GXX = 15  # that the pinned toolkit takes; one that is there says so itself
# What our sources need of C++20, and the header without which a compiler has no library.
CXX20 = """#include <concepts>
#include <cstdint>
template <std::integral T> constexpr auto twice = []<int n>(T x) { return n * x; };
static_assert(twice<std::int64_t>.operator()<2>(3) == 6);
"""


def check_platform() -> None:
    if sys.platform != "linux":
        raise BuildProblem("unknown platform", sys.platform, "Linux", "use WSL 2")


def check_host_compiler(toolkit: Toolkit | None) -> str:
    """A g++ that both C++20 and this nvcc accept: $CXX if set, else the first that fits.

    Args:
        toolkit: None where the pinned one is yet to be fetched.

    Raises:
        BuildProblem: none is there, or those that are do not fit or do not work.
    """
    limit = NEWEST_GXX
    for header in toolkit.home.rglob("crt/host_config.h") if toolkit else ():
        match = re.search(r"__GNUC__ > (\d+)", header.read_text())
        limit = int(match.group(1)) if match else limit
        break
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", *(f"g++-{number}" for number in range(limit, 10, -1))]
    refused = []
    for name in names:
        path = shutil.which(name.split()[0])
        if path is None:
            continue
        said = _output([path, "--version"])
        version = _output([path, "-dumpversion"]).strip().split(".")[0]
        if "clang" not in said and not (version.isdigit() and 11 <= int(version) <= limit):
            refused.append(f"{path} is g++ {version}")
        elif complaint := _refuses_cxx20(path):
            refused.append(f"{path} does not compile C++20: {complaint}")
        else:
            return path
    release = toolkit.version if toolkit else pin("cuda-toolkit").rpartition(".")[0]
    raise BuildProblem(
        "no C++ compiler that fits",
        "; ".join(refused) or f"no {named or 'g++'}",
        f"g++ 11 to {limit} (CUDA {release} takes no newer one)",
        f"{_packaged('g++-12', 'gcc-c++')}, or set CXX to the one to use",
    )


def _refuses_cxx20(compiler: str) -> str:
    """The first error for a few lines of it, "" if there is none: g++ may be there without the rest."""
    command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(command, input=CXX20, text=True, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    lines = done.stderr.splitlines() or [f"status {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0]) if done.returncode else ""


def check_python_headers() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        number = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise BuildProblem(
            "Python's headers are missing",
            f"no Python.h in {include}",
            f"the headers of Python {number}",
            _packaged(f"python{number}-dev", f"python{number}-devel"),
        )
    return include


def _packaged(debian: str, fedora: str) -> str:
    """The command that installs a package of the system."""
    if shutil.which("apt-get") is None and shutil.which("dnf"):
        return f"dnf install {fedora}"
    return f"apt-get install {debian}"


def find_ninja() -> str:
    try:
        import ninja
    except ImportError:
        path = shutil.which("ninja")
    else:
        path = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if path is None:
        raise BuildProblem(
            "ninja is missing",
            "no ninja on PATH and no ninja module",
            "ninja 1.11 or newer",
            "python -m pip install ninja",
        )
    return path


def _output(command: list[str]) -> str:
    """Both output streams of a command, empty if it cannot be run."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def words_of(*commands: list[str]) -> str:
    """What tools say of themselves, one after the other."""
    return "".join(_output(command) for command in commands)


# ---------------------------------------------------------------- what to fetch


def missing_requirements() -> list[str]:
    """What an isolated build has to fetch besides setuptools and ninja.

    What a package cannot bring is looked for first: gigabytes are not fetched for a build that cannot be.

    FLASH_EXT_BUILD_TORCH names the torch to build against, for front ends that hide the target environment.

    Raises:
        BuildProblem: the target's torch cannot be built against, or a compiler or Python's headers are
            missing.
    """
    check_platform()
    toolkit, _ = find_toolkit()
    check_host_compiler(toolkit)
    check_python_headers()
    asked = os.environ.get("FLASH_EXT_BUILD_TORCH")
    torch = None if asked else find_torch()
    if torch is not None:
        check_torch(torch)
    named = re.fullmatch(r"torch\s*==\s*(\d[\w.+]*)", asked.strip()) if asked else None
    minimum = pin("torch-minimum")
    if named and as_numbers(named.group(1)) < as_numbers(minimum):  # said before gigabytes are fetched
        raise BuildProblem(
            "no torch that fits",
            f"FLASH_EXT_BUILD_TORCH={asked}",
            f"torch {minimum} or newer",
            f'export FLASH_EXT_BUILD_TORCH="{torch_requirement()}"',
        )
    fetched = None if torch is not None else asked or torch_requirement()
    needed = [fetched] if fetched else []
    if toolkit is None:
        needed.append(toolkit_requirement(beside=fetched))
    return needed
