"""Installing: what a build finds, what it fetches, and what it says when a piece is missing or unfit."""

from __future__ import annotations

import email.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import flash_ext
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import archs as archs_of_build  # noqa: E402
from build_backend import compile as kernels_build  # noqa: E402
from build_backend import environment, hooks, pins, prepare, published  # noqa: E402

pytestmark = pytest.mark.everywhere

ARCH_VARIABLES = ("FLASH_EXT_ARCHS", "TORCH_CUDA_ARCH_LIST")
TOOLKIT = environment.Toolkit(Path("/toolkit"), "13.0", Path("/toolkit/lib/libcudart_static.a"))


def fake_torch(
    folder: Path, version: str, cuda: str | None = None, hip: str | None = None
) -> environment.TorchInstall:
    root = folder / "torch"
    root.mkdir(parents=True)
    (root / "version.py").write_text(
        f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
        f"hip: Optional[str] = {hip!r}\n"
    )
    return environment.read_torch(root)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_toolkit(home: Path, release: str = "13.0") -> Path:
    """A toolkit with everything that is looked at, and nothing that works."""
    executable(
        home / "bin" / "nvcc",
        f'case "$1" in --version) echo "release {release}, V{release}.88";; '
        f'--dryrun) echo "#$ TOP={home}/bin/..";; esac',
    )
    major, minor = release.split(".")
    number = int(major) * 1000 + int(minor) * 10
    for name, text in {
        "include/cuda_runtime.h": "",
        "include/crt/host_config.h": "#if __GNUC__ > 15\n",
        "include/cuda_runtime_api.h": f"#define CUDART_VERSION {number}\n",
        "include/cccl/nv/target": "",
        "nvvm/bin/cicc": "",
        "lib/libcudart_static.a": "",
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return home


def refusal(action) -> str:
    with pytest.raises(environment.BuildProblem) as caught:
        action()
    text = str(caught.value)
    assert re.search(r"^  found:  .+\n  needed: .+\n  mend:   .+$", text, re.M), text
    return text


# ---- torch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, cuda, minor",
                         [
                             ("2.11.0+cu130", "13.0", "2.11"), ("2.13.0+cpu", None, "2.13"),
                             ("2.15.0+cu132", "13.2", "2.15"), ("2.16.0.dev20261101+cu130", "13.0", "2.16"),
                         ])  # fmt: skip
def test_torch_that_fits(tmp_path, version, cuda, minor):
    found = environment.check_torch(fake_torch(tmp_path, version, cuda))
    assert (found.version, found.minor) == (version, minor)


@pytest.mark.parametrize(
    "version, cuda, hip, said",
    [
        ("2.10.0+cu130", "13.0", None, "torch 2.10.0+cu130"),
        ("2.9.1", "12.8", None, "CUDA 12.8"),
        ("2.13.0+cu126", "12.6", None, "CUDA 12.6"),
        ("2.13.0+rocm7", None, "7.0", "ROCm 7.0"),
    ],
)
def test_torch_that_does_not_fit(tmp_path, version, cuda, hip, said):
    text = refusal(lambda: environment.check_torch(fake_torch(tmp_path, version, cuda, hip)))
    assert said in text and f'pip install "torch=={pins.pin("torch")}"' in text and str(tmp_path) in text


# ---- toolkit ---------------------------------------------------------------------------------------------


def test_complete_toolkit(tmp_path):
    found = environment.inspect_toolkit(fake_toolkit(tmp_path))
    assert isinstance(found, environment.Toolkit)
    assert (found.version, found.cudart.name) == ("13.0", "libcudart_static.a")


@pytest.mark.parametrize("missing, said",
                         [
                             ("bin/nvcc", "no bin/nvcc"), ("include/cuda_runtime.h", "cudart package"),
                             ("include/crt/host_config.h", "crt package"),
                             ("include/cccl/nv/target", "cccl package"), ("nvvm/bin/cicc", "nvvm package"),
                             ("lib/libcudart_static.a", "cudart package"),
                         ])  # fmt: skip
def test_incomplete_toolkit(tmp_path, missing, said):
    (fake_toolkit(tmp_path) / missing).unlink()
    assert said in environment.inspect_toolkit(tmp_path)


def test_toolkit_of_mixed_releases(tmp_path):
    """What pip makes of a bare requirement on nvcc: newer headers than the compiler."""
    (fake_toolkit(tmp_path) / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION 13050\n")
    assert "nvcc is 13.0 but the headers are of 13.5" in environment.inspect_toolkit(tmp_path)


def test_wrapper_on_path_leads_to_the_toolkit(tmp_path, monkeypatch):
    """An nvcc on PATH may be a script in a folder without headers; nvcc itself says where it lives."""
    home = fake_toolkit(tmp_path / "toolkit")
    executable(tmp_path / "bin" / "nvcc", f'exec {home}/bin/nvcc "$@"')
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found, _ = environment.find_toolkit()
    assert found.home == home


def test_wrong_cuda_home_is_passed_over_and_named(tmp_path, monkeypatch):
    fake_toolkit(tmp_path / "old", "12.4")
    fake_toolkit(tmp_path / "new", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "new"))
    found, refused = environment.find_toolkit()
    assert found.home == tmp_path / "new"
    assert refused == [f"{tmp_path / 'old'}: nvcc is 12.4, CUDA 13 is needed"]


# ---- host tools ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, fits", [("10", False), ("11", True), ("15", True), ("16", False)])
def test_host_compiler_bounds(tmp_path, monkeypatch, version, fits):
    toolkit = environment.inspect_toolkit(fake_toolkit(tmp_path / "toolkit"))
    compiler = executable(tmp_path / "g++", f'case "$1" in -dumpversion) echo {version};; *) echo g++;; esac')
    monkeypatch.setenv("CXX", str(compiler))
    if fits:
        assert environment.check_host_compiler(toolkit) == str(compiler)
    else:
        assert f"{compiler} is g++ {version}" in refusal(lambda: environment.check_host_compiler(toolkit))


# ---- what an isolated build fetches ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "has_torch, has_toolkit, asked, fetched",
    [
        (True, True, None, []),
        (True, False, None, ["cuda-toolkit[nvcc,nvvm,crt,cccl,cudart,nvtx]==13.0.2"]),
        (False, True, None, ["torch==2.13.0"]),
        # A CUDA build of torch pins the patch release of the toolkit itself.
        (False, False, None, ["torch==2.13.0", "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart,nvtx]==13.0.*"]),
        (True, True, "torch==2.15.0", ["torch==2.15.0"]),
        (
            True,
            False,
            "torch==2.15.0",
            ["torch==2.15.0", "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart,nvtx]==13.*"],
        ),
    ],
)
def test_what_is_fetched(tmp_path, monkeypatch, has_torch, has_toolkit, asked, fetched):
    present = fake_torch(tmp_path, "2.12.1+cu130", "13.0") if has_torch else None
    monkeypatch.setattr(environment, "find_torch", lambda: present)
    monkeypatch.setattr(environment, "find_toolkit", lambda: (TOOLKIT if has_toolkit else None, []))
    monkeypatch.delenv("FLASH_EXT_BUILD_TORCH", raising=False)
    if asked:
        monkeypatch.setenv("FLASH_EXT_BUILD_TORCH", asked)
    assert environment.missing_requirements() == fetched


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"CXX": "/nowhere/none"}, "no /nowhere/none"),
        ({"FLASH_EXT_ARCHS": "9"}, "'9'"),
        ({}, "no Python.h in /nowhere"),
    ],
)
def test_what_no_package_brings_is_checked_before_anything_is_fetched(monkeypatch, variables, said):
    """pip asks this hook before it fetches torch and nvcc."""
    if not variables:
        monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: "/nowhere")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"{re.escape(said)}(.|\n)*\n  mend:   "):
        hooks.get_requires_for_build_wheel()


NO_HEADERS = """import sysconfig
found = sysconfig.get_path
sysconfig.get_path = lambda name, *more, **own: "/nowhere" if name == "include" else found(name, *more, **own)
"""


@pytest.mark.parametrize("target", ["build", "demo", "test", "bench", "info"])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"CXX": "/nowhere/none"},
            "no C++ compiler that fits.\n  found:  no /nowhere/none\n  needed: g++ 11",
        ),
        ({"without": "headers"}, "Python's headers are missing.\n  found:  no Python.h in /nowhere\n"),
        ({}, ""),
    ],
    ids=["no compiler", "no headers", "both"],
)
def test_make_checks_it_before_an_environment_is_made(tmp_path, target, variables, said):
    """prepare.py, which fetches torch, is started behind the checks alone."""
    log, modules = tmp_path / "log", tmp_path / "modules"
    modules.mkdir()
    if "without" in variables:
        (modules / "sitecustomize.py").write_text(NO_HEADERS)
    script = f'case "$1" in *prepare.py) echo prepare >> {log}; exit 9;; *) exec {sys.executable} "$@";; esac'
    python = executable(tmp_path / "python", script)
    done = subprocess.run(
        ["make", target, f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=300, env=os.environ | variables | {"PYTHONPATH": str(modules)},
    )  # fmt: skip
    assert done.returncode == 2 and log.exists() == (not said), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    assert said == "" or "\n  mend:   " in done.stderr


def test_make_asks_an_environment_that_is_there_for_its_headers(tmp_path):
    """Those of the python3 that would have made it are another matter. A style check needs no compiler."""
    executable(tmp_path / "venv" / "bin" / "python", "exit 0")

    def planned(target: str) -> str:
        call = ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert planned("build").startswith(f'{tmp_path}/venv/bin/python -c "$CHECK" && py=$(python3 ')
    assert "$CHECK" not in planned("lint")


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ("nothing", "system"),
        ("torch for CUDA 12", "auto"),
        ("torch for the CPU", "auto"),
        ("torch that does not load", "auto"),
        ("no toolkit", "auto"),
        ("no numpy", "auto"),
        ("no setuptools", "auto"),
        ("an environment", "auto"),
        ("another folder", "there"),
    ],
)
def test_the_demo_takes_a_python_that_has_all_it_needs(tmp_path, change, asked):
    """Else it asks for what it asked for before: prepare.py is given --venv, and stops here."""
    folder, modules, log = tmp_path / "clone", tmp_path / "modules", tmp_path / "log"
    backend = folder / "csrc" / "build_backend"
    shutil.copytree(ROOT / "csrc" / "build_backend", backend)
    for name in ("Makefile", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    if change == "no toolkit":
        with (backend / "environment.py").open("a") as file:
            file.write("def _toolkit_candidates(): return ()\n")
    cuda = {"torch for CUDA 12": "12.8", "torch for the CPU": None}.get(change, "13.0")
    fake_torch(modules, "2.12.1", cuda)
    loads = "raise OSError" if change == "torch that does not load" else "from . import version"
    (modules / "torch" / "__init__.py").write_text(f"{loads}\n__version__ = version.__version__\n")
    for name in {"numpy", "setuptools", "ninja"} - {change.removeprefix("no ")}:
        (modules / name).mkdir()
        (modules / name / "__init__.py").write_text("BIN_DIR = __path__[0]\n")
        executable(modules / name / "ninja", "")
    toolkit = fake_toolkit(tmp_path / "toolkit")
    if change == "an environment":
        (folder / ".venv").mkdir()
    script = f'case "$1" in *prepare.py) echo "$3" > {log}; exit 9;; *) exec {sys.executable} -S "$@";; esac'
    python = executable(tmp_path / "python", script)
    given = ["VENV=there"] if change == "another folder" else []
    outside = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "VENV")}
    done = subprocess.run(
        ["make", "--no-print-directory", "demo", f"PYTHON={python}", *given], cwd=folder, capture_output=True,
        text=True, check=False, timeout=300,
        env=outside | {"PYTHONPATH": str(modules), "CUDA_HOME": str(toolkit), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert log.read_text() == f"{asked}\n", done.stderr
    fetches, has_all = "fetches torch" in done.stderr, "nothing is fetched" in done.stderr
    assert (fetches, has_all) == (asked != "system", asked == "system")
    assert "Traceback" not in done.stderr


def run_hook(call: str, *, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """Calls a PEP 517 hook as a front end does: in a fresh process, in the project's folder."""
    code = f"import sys; sys.path.insert(0, 'csrc'); from build_backend import hooks; {call}"
    before = {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | before | variables,
                          text=True, capture_output=True, check=False, timeout=300)  # fmt: skip


def test_wheel_metadata_pins_the_torch_minor_it_was_built_with(tmp_path):
    """Elsewhere the module would not load: C++ extensions of one torch have undefined symbols in the next."""
    done = run_hook(f"hooks.prepare_metadata_for_build_wheel({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    fields = email.parser.Parser().parsestr(metadata.read_text())
    torch_minor = ".".join(torch.__version__.split(".")[:2])
    runtime = [item for item in fields.get_all("Requires-Dist") if "extra ==" not in item]
    assert runtime == [f"torch=={torch_minor}.*"]
    assert fields["Version"] == flash_ext.__version__ and fields["License-Expression"] == "BSD-3-Clause"


def test_source_archive_is_complete_and_made_without_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    done = run_hook(f"hooks.build_sdist({str(tmp_path)!r})", path=tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
        (info_name,) = (name for name in content.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name))
        package_info = content.extractfile(info_name).read().decode()
    needed = {
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "flash_ext")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".typed", ".h", ".cpp", ".cu", ".cuh")
    }
    assert needed <= names
    assert {"LICENSE", "Makefile", "setup.py", "pyproject.toml", "README.md"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert f"Requires-Dist: torch>={pins.pin('torch-minimum')}" in package_info


def test_hook_ends_in_the_message_alone(tmp_path):
    """No traceback around it: the front end shows what the hook prints."""
    fake_torch(tmp_path, "2.9.1", "12.8")
    done = run_hook("hooks.get_requires_for_build_wheel()", path=tmp_path)
    assert done.returncode == 1
    assert "torch 2.9.1, built for CUDA 12.8" in done.stderr and "Traceback" not in done.stderr


# ---- choices of a build ----------------------------------------------------------------------------------


def test_architectures_by_default(monkeypatch):
    for name in (*ARCH_VARIABLES, "FLASH_EXT_DEBUG", "FLASH_EXT_MUTANT"):
        monkeypatch.delenv(name, raising=False)
    variant = kernels_build.Variant.from_environment()
    assert (variant.name, variant.defines) == ("release", [])
    assert [flag for flag in variant.nvcc_flags if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]


def test_switches_of_a_build(monkeypatch):
    def chosen(name: str, value: str) -> kernels_build.Variant:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            return kernels_build.Variant.from_environment()

    debug, mutant = chosen("FLASH_EXT_DEBUG", "1"), chosen("FLASH_EXT_MUTANT", "7")
    assert (debug.name, debug.defines) == ("debug", ["-DFLASH_EXT_DEBUG=1"])
    assert (mutant.name, mutant.defines) == ("mutant7", [])
    assert "-lineinfo" in chosen("FLASH_EXT_LINEINFO", "1").nvcc_flags
    assert "-lineinfo" not in chosen("FLASH_EXT_LINEINFO", "0").nvcc_flags


def archs_of(monkeypatch, ours: str | None = None, torchs: str | None = None) -> tuple[str, ...]:
    for name, value in zip(ARCH_VARIABLES, (ours, torchs), strict=True):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    return kernels_build.Variant.from_environment().archs


@pytest.mark.parametrize(
    "ours, torchs, archs",
    [
        (None, None, "8.0 8.0+PTX 9.0a"),
        ("9.0", None, "9.0a"),
        ("9.0a", "8.0", "9.0a"),  # ours goes first
        (None, "9.0", "9.0a"),
        (None, "8.0+PTX", "8.0 8.0+PTX"),
        ("8.0, 8.0+PTX;9.0a", None, "8.0 8.0+PTX 9.0a"),
        (None, "8.0;8.6 ; 12.0+PTX", "8.0 8.6 12.0 12.0+PTX"),
        (None, "9.0+PTX", "9.0a 8.0+PTX"),  # PTX with Hopper's own instructions runs on Hopper alone
        (None, "Hopper", "9.0a 8.0+PTX"),
        (None, "Ampere;Ada", "8.0 8.6 8.6+PTX 8.9 8.9+PTX"),
        (None, "7.0 7.5 Volta 8.0 9.0", "8.0 9.0a"),  # a list for every project
        ("", " ", "8.0 8.0+PTX 9.0a"),
    ],
)
def test_architectures_by_either_variable(monkeypatch, ours, torchs, archs):
    assert archs_of(monkeypatch, ours, torchs) == tuple(archs.split())


@pytest.mark.parametrize("ours, torchs, said",
                         [
                             ("hoper", None, "'hoper'"), ("9.0a 7.5", None, "no kernel runs before 8.0"),
                             ("Turing", None, "'Turing'"), (None, "9", "TORCH_CUDA_ARCH_LIST with '9'"),
                             (None, "7.5", "no kernel runs before 8.0"), (None, "native", "'native'"),
                         ])  # fmt: skip
def test_unknown_architecture_is_refused(monkeypatch, ours, torchs, said):
    assert said in refusal(lambda: archs_of(monkeypatch, ours, torchs))


@pytest.mark.parametrize("listed, archs",
                         [
                             ("9.0\n9.0", "9.0a"), ("8.6", "8.0"), ("8.0\n 9.0", "8.0 9.0a"),
                             ("12.0", "8.0+PTX"), ("7.5\n8.9", "8.0"),
                         ])  # fmt: skip
def test_the_architecture_of_the_gpu_that_is_here(tmp_path, monkeypatch, listed, archs):
    """The part of the default build that runs there, by nvidia-smi."""
    executable(tmp_path / "nvidia-smi", f"printf '{listed}\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert archs_of(monkeypatch, "native") == tuple(archs.split())


@pytest.mark.parametrize("capability, archs", [((9, 0), "9.0a"), ((7, 5), None), (None, None)])
def test_the_gpu_that_is_here_by_torch(tmp_path, monkeypatch, capability, archs):
    """Where there is no nvidia-smi, or none that works."""
    executable(tmp_path / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    torch_here = fake_torch(tmp_path / "site", "2.13.0")
    (torch_here.root / "__init__.py").write_text(
        f"class cuda:\n    device_count = staticmethod(lambda: {int(bool(capability))})\n"
        f"    get_device_capability = staticmethod(lambda index: {capability})\n"
    )
    monkeypatch.setattr(archs_of_build, "find_torch", lambda: torch_here)
    if archs:
        assert archs_of(monkeypatch, "native") == tuple(archs.split())
    else:
        text = refusal(lambda: archs_of(monkeypatch, "native"))
        assert "no GPU here" in text and ("7.5" in text) == bool(capability)


def test_an_architecture_that_nvcc_does_not_know(tmp_path):
    nvcc = executable(tmp_path / "bin" / "nvcc", "echo sm_80; echo sm_90; echo sm_120")
    toolkit = environment.Toolkit(nvcc.parents[1], "13.0", tmp_path)
    archs_of_build.check_compiler(toolkit, ("8.0", "8.0+PTX", "9.0a", "12.0"))
    text = refusal(lambda: archs_of_build.check_compiler(toolkit, ("8.5",)))
    assert "8.5" in text and "8.0 9.0 12.0" in text


def test_parallel_jobs(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert kernels_build.parallel_jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "all")
    assert "'all'" in refusal(kernels_build.parallel_jobs)
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= kernels_build.parallel_jobs() <= os.cpu_count()
    monkeypatch.setattr(kernels_build, "BYTES_PER_JOB", 2**60)
    assert kernels_build.parallel_jobs() == 1


def test_python_used_as_it_is_must_have_the_modules():
    text = refusal(lambda: prepare.check_system(["pytest", "a_module_nobody_has"]))
    assert "a_module_nobody_has" in text and "pytest" not in text.split("needed:")[0]


@pytest.mark.parametrize("cuda, reachable, system",
                         [("13.0", False, True), ("13.0", True, False), (None, False, False)])  # fmt: skip
def test_when_python3_itself_is_used(tmp_path, monkeypatch, cuda, reachable, system):
    monkeypatch.setattr(environment, "find_torch", lambda: fake_torch(tmp_path, "2.11.0", cuda))
    monkeypatch.setattr(prepare, "reaches_index", lambda: reachable)
    assert prepare.must_use_system() == system


class Filled:
    """An environment whose pip notes what it is asked to install."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.toolkit: environment.Toolkit | None = TOOLKIT
        monkeypatch.setattr(prepare, "install", lambda *what: self.asked.append(what))
        monkeypatch.setattr(sys, "prefix", str(folder))
        monkeypatch.setattr(environment, "find_toolkit", lambda: (self.toolkit, []))

    def fill(self, *extras: str) -> set[str]:
        """The names of what was installed, in whatever folder."""
        self.asked.clear()
        prepare.fill(list(extras))
        return {prepare.name_of(item) for what in self.asked for item in what if item[0] not in "-/"}


@pytest.fixture
def filled(tmp_path, monkeypatch) -> Filled:
    return Filled(tmp_path, monkeypatch)


def test_the_demo_gets_what_it_needs_and_no_more(filled):
    assert filled.fill("demo") == {"torch", "setuptools", "ninja", "matplotlib", "numpy", "rich"}
    assert filled.fill("demo") == filled.fill() == set()


def test_tests_add_their_own_and_what_is_there_stays(filled):
    filled.fill("demo")
    added = filled.fill("test", "demo")
    assert {"pytest", "transformers", "diffusers", "nvidia-cuda-nvdisasm"} <= added
    (beside,) = (what for what in filled.asked if "--target" in what)
    # pip would print that it conflicts with the one beside it, which is why it has a folder of its own.
    assert beside[-1] == f"transformers=={pins.pin('transformers-other')}" and "--no-warn-conflicts" in beside
    assert filled.fill("demo") == filled.fill("test", "demo") == filled.fill() == set()


def test_make_asks_for_the_extras_of_each_target():
    def asked(target: str) -> str:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
        return re.search(r"--extras(.*?)--modules", done.stdout).group(1).strip()

    extras = {"build": "", "info": "", "demo": "demo", "bench": "demo", "lint": "dev", "test": "test demo"}
    assert {name: asked(name) for name in extras} == extras
    assert set(asked("test").split()) <= set(pins.pyproject()["project"]["optional-dependencies"])


# ---- where it is published -------------------------------------------------------------------------------


def test_addresses_follow_the_place_of_the_sources():
    place = "https://forge.invalid/us/flash_ext"
    assert set(published.links(place)) == {"Source", "Issues", "Changelog"}
    readme = (
        "![speed](bench/a.png) [docs](docs/masks.md#top) [here](#api) [far](https://other.invalid/x)\n\n"
        "## Install\n\n```sh\npip install .\n```\n"
    )
    shown = published.description(readme, place)
    assert f"![speed]({place}/raw/HEAD/bench/a.png) [docs]({place}/blob/HEAD/docs/masks.md#top)" in shown
    assert "[here](#api) [far](https://other.invalid/x)" in shown
    assert shown.index(f"git clone {place} && cd flash_ext\n") < shown.index("pip install .")
    whole = published.description((ROOT / "README.md").read_text(), place)
    assert not re.search(r"\]\((?!#|https?:)", whole)
