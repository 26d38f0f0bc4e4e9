"""Which module a package loads, in a source folder and outside; where none does, what mends it is named."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext import info
from flash_ext._ops import extension
from tests.built import module_file
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import compile as kernels_build  # noqa: E402
from build_backend import prepare, sources  # noqa: E402

pytestmark = pytest.mark.everywhere

OTHER_TORCH = "2.10.9+cu126"
# A user's program, and then both reports of `python -m flash_ext.info`, for each of some folders of installed
# packages. Each has a process of its own, but torch is imported once.
PROGRAM = """
import os, runpy, sys, torch
for site in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    sys.path.insert(1, site)
    import flash_ext
    if flash_ext._ops.library.is_built:
        q = torch.randn(1, 20, 2, 16, requires_grad=True)
        flash_ext.attention(q, q, q, causal=True).sum().backward()
        print(flash_ext._C.__file__, flash_ext._C is flash_ext._ops.library._C, bool(q.grad.abs().sum() > 0))
    for arguments in [], ["--json"]:
        print("----")
        sys.argv[1:] = arguments
        runpy.run_module("flash_ext.info", run_name="__main__")
    print("----")
    break
"""


@pytest.fixture
def source_folder(tmp_path: Path) -> Path:
    """The package's Python files beside kernel sources, as a clone has them; returns the package."""
    target = tmp_path / "clone" / "flash_ext"
    shutil.copytree(ROOT / "flash_ext", target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = target.parent / "csrc" / "build_backend"
    build.mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / "build_backend" / "sources.py", build)
    (target.parent / "csrc" / "kernel.cu").write_text("// a kernel\n")
    return target


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed package, whose module a test adds."""
    folder = tmp_path / "site"
    (folder / "flash_ext").mkdir(parents=True)
    (folder / "flash_ext-0.1.0.dist-info").mkdir()
    (folder / "flash_ext-0.1.0.dist-info" / "METADATA").write_text("Name: flash_ext\nVersion: 0.1.0\n")
    return folder


@pytest.fixture
def in_python(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are Python files, which load beside the real one; what a load sets is undone."""
    monkeypatch.setattr(extension.importlib.machinery, "EXTENSION_SUFFIXES", [".py"])
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setitem(sys.modules, "flash_ext._C", flash_ext._C)
    monkeypatch.setattr(flash_ext, "_C", flash_ext._C)


def write_module(package: Path, built_from: str, built_for: str = torch.__version__) -> Path:
    """A module with the build record of these sources and this torch, and nothing else."""
    record = {"version": "0.1.0", "torch": built_for, "sources": built_from}
    file = package / f"_C{extension.importlib.machinery.EXTENSION_SUFFIXES[0]}"
    file.write_text(f"# flash_ext build record: {json.dumps(record)}\n")
    return file


def hash_of(package: Path) -> str:
    return sources.content_hash(package.parent / "csrc")


def run(package: Path, *sites: Path) -> list[str]:
    """What a user sees who starts Python in the folder that holds the package: three parts for each site."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *sites], cwd=package.parent, env=environment,
                          text=True, capture_output=True, check=False, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("----\n")[:-1]


def loaded_in(package: Path) -> str:
    """The module's file."""
    module = extension.load(package)
    assert sys.modules["flash_ext._C"] is flash_ext._C is module
    return module.__file__


def message_in(package: Path, *, reasons: tuple[str, ...]) -> str:
    """What is said where nothing loads, after its reasons."""
    stand_in = extension.load(package)
    assert isinstance(stand_in, extension.MissingExtension)
    with pytest.raises(ImportError) as caught:
        stand_in.fwd(None)
    why, _, command = str(caught.value).partition(". Build it for this torch: ")
    assert [said for said in reasons if said not in why] == [], why
    return command


def pip_of(package: Path) -> str:
    command = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", str(package.parent)]
    return shlex.join(command)


# ---- a source folder, in which Python finds the package before the installed one -----------------------


def test_programs_in_the_source_folder(source_folder, site, tmp_path):
    """Where the module of the installed package serves, and where no package is installed.

    The installed one is that of this run, as a build from the folder's sources would have left it.
    """
    write_module(source_folder, hash_of(source_folder), OTHER_TORCH)
    own = extension.build_record(module_file())["sources"]
    installed = site / "flash_ext" / f"_C{extension.importlib.machinery.EXTENSION_SUFFIXES[0]}"
    content = module_file().read_bytes().replace(own.encode(), hash_of(source_folder).encode())
    installed.write_bytes(content)
    example, text, as_json, no_example, why_not, why_not_json = run(source_folder, site, tmp_path)

    assert example.split() == [str(installed), "True", "True"]
    report = json.loads(as_json)
    assert report["flash_ext"]["location"] == str(source_folder)
    assert (report["extension"]["file"], report["extension"]["message"]) == (str(installed), None)
    assert str(installed) in text and "no GPU is visible" in text

    missing = json.loads(why_not_json)["extension"]
    assert (no_example, missing["loaded"]) == ("", False)
    for said in (missing["message"], why_not):
        assert OTHER_TORCH in said and torch.__version__ in said and pip_of(source_folder) in said


@pytest.mark.parametrize("own", ["none", "for another torch", "of other sources"])
def test_the_installed_module_of_the_same_sources_serves(source_folder, site, in_python, own):
    if own == "for another torch":  # what `make demo` leaves in the folder is for the torch of .venv
        write_module(source_folder, hash_of(source_folder), OTHER_TORCH)
    elif own == "of other sources":  # from a build in place, before these were installed
        write_module(source_folder, "0" * 16)
    installed = write_module(site / "flash_ext", hash_of(source_folder))
    assert loaded_in(source_folder) == str(installed)


@pytest.mark.parametrize("of_own", ["these", "0" * 16])
def test_the_module_in_the_folder_comes_before_one_of_other_sources(
    source_folder, site, in_python, monkeypatch, of_own
):
    """Also while its own sources are being edited, which the report tells then."""
    own = write_module(source_folder, hash_of(source_folder) if of_own == "these" else of_own)
    write_module(site / "flash_ext", "1" * 16)
    assert loaded_in(source_folder) == str(own)
    flash_ext._C.build_info, flash_ext._C.plan = info.ops._C.build_info, info.ops._C.plan
    monkeypatch.setattr(info, "PACKAGE", source_folder)
    monkeypatch.setattr(info.ops, "_C", flash_ext._C)
    report = info.collect()
    found = report["extension"]
    assert (found["loaded"], found["file"]) == (True, str(own))
    if of_own == "these":
        assert found["message"] is None
    else:
        assert found["message"].endswith(pip_of(source_folder)) and found["message"] in info.as_text(report)


# ---- where nothing loads -------------------------------------------------------------------------------


def test_the_installed_module_is_of_other_sources(source_folder, site, in_python):
    installed = write_module(site / "flash_ext", hash_of(source_folder))
    with (source_folder.parent / "csrc" / "kernel.cu").open("a") as kernel:
        kernel.write("// changed\n")
    reasons = (f"the installed {installed} was built from other sources",)
    assert message_in(source_folder, reasons=reasons) == pip_of(source_folder)


def test_both_modules_are_for_another_torch(source_folder, site, in_python):
    """Not an undefined symbol."""
    for package in (source_folder, site / "flash_ext"):
        write_module(package, hash_of(source_folder), OTHER_TORCH)
    reasons = (
        f"flash_ext._C was built for torch {OTHER_TORCH}",
        f"this is torch {torch.__version__}",
        str(source_folder),
        str(site),
    )
    assert message_in(source_folder, reasons=reasons) == pip_of(source_folder)


def test_the_environment_of_make_is_mended_by_make(source_folder, monkeypatch):
    """One that a user made by the same name is not: make would put its own torch in there."""
    venv = source_folder.parent / ".venv"
    venv.mkdir()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "prefix", str(venv))
    assert message_in(source_folder, reasons=()) == pip_of(source_folder)
    (venv / prepare.STAMP).write_text("{}")
    assert message_in(source_folder, reasons=()) == f"make -C {source_folder.parent} build"


# ---- the hash ------------------------------------------------------------------------------------------


def test_the_module_holds_the_hash_of_its_sources(monkeypatch):
    record = extension.build_record(module_file())
    assert record["torch"] == torch.__version__ and len(record["sources"]) == 16
    monkeypatch.setattr(kernels_build, "content_hash", lambda csrc: f"hash of {csrc.name}")
    found = types.SimpleNamespace(version="13.0")
    tools = types.SimpleNamespace(torch=found, toolkit=found)
    baked_in = kernels_build._build_record(tools, kernels_build.Variant(("9.0a",)), "0.1.0")
    assert r"\"sources\": \"hash of csrc\"" in baked_in


def test_the_hash_knows_every_name_and_byte(tmp_path):
    def change(action) -> bool:
        before = sources.content_hash(tmp_path)
        action()
        return sources.content_hash(tmp_path) != before

    (tmp_path / "sm90").mkdir()
    for number, suffix in enumerate(sources.SUFFIXES):
        file = tmp_path / "sm90" / f"kernel{suffix}"
        assert change(lambda: file.write_text(str(number)))  # noqa: B023
        assert change(lambda: file.write_text(f"{number} "))  # noqa: B023
        assert change(lambda: file.rename(tmp_path / file.name))  # noqa: B023
    assert not change(lambda: (tmp_path / "compile.py").write_text("no kernel"))
    assert {path.suffix for path in kernels_build.source_files()} < set(sources.SUFFIXES)
