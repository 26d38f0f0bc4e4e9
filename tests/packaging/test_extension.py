"""Which module a package loads, in a source folder and outside; where none does, what mends it is named."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import types
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from flash_ext._ops import extension
from tests.built import module_file
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import compile as kernels_build  # noqa: E402
from build_backend import prepare, sources  # noqa: E402

pytestmark = pytest.mark.everywhere

OTHER_TORCH = b'\x7fELF flash_ext build record: {"version": "0.1.0", "torch": "2.10.9+cu126"}\n'
EXAMPLE = """
import torch, flash_ext
q = torch.randn(1, 20, 2, 16, requires_grad=True)
flash_ext.attention(q, q, q, causal=True).sum().backward()
print(flash_ext._C.__file__, flash_ext._C is flash_ext._ops.library._C, bool(q.grad.abs().sum() > 0))
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
    """A folder that packages are installed into; ``as_installed`` takes a module there."""
    folder = tmp_path / "site"
    (folder / "flash_ext").mkdir(parents=True)
    (folder / "flash_ext-0.1.0.dist-info").mkdir()
    (folder / "flash_ext-0.1.0.dist-info" / "METADATA").write_text("Name: flash_ext\nVersion: 0.1.0\n")
    return folder


def write_module(package: Path, built_from: str) -> Path:
    """The module of this run, as a build from other sources would have left it."""
    own = extension.build_record(module_file())["sources"]
    file = package / f"_C{EXTENSION_SUFFIXES[0]}"
    file.write_bytes(module_file().read_bytes().replace(own.encode(), built_from.encode()))
    return file


def hash_of(package: Path) -> str:
    return sources.content_hash(package.parent / "csrc")


def run(package: Path, site: Path, *arguments: str) -> str:
    """As a user starts Python in the folder that holds the package."""
    environment = os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], cwd=package.parent, env=environment, text=True,
                          capture_output=True, check=False, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_in(package: Path, site: Path) -> str:
    """The module's file that an example used."""
    file, is_one, has_gradient = run(package, site, "-c", EXAMPLE).split()
    assert (is_one, has_gradient) == ("True", "True")
    return file


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


def test_the_installed_module_of_the_same_sources_serves_the_source_folder(source_folder, site):
    installed = write_module(site / "flash_ext", hash_of(source_folder))
    assert loaded_in(source_folder, site) == str(installed)
    report = json.loads(run(source_folder, site, "-m", "flash_ext.info", "--json"))
    assert report["flash_ext"]["location"] == str(source_folder)
    assert (report["extension"]["file"], report["extension"]["message"]) == (str(installed), None)


def test_a_module_for_another_torch_is_passed_over(source_folder, site):
    """What `make demo` leaves in the folder is for the torch of .venv."""
    (source_folder / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(OTHER_TORCH)
    installed = write_module(site / "flash_ext", hash_of(source_folder))
    assert loaded_in(source_folder, site) == str(installed)


def test_a_module_older_than_the_sources_is_passed_over(source_folder, site):
    """After a build in place, other sources, and an installation of these."""
    write_module(source_folder, "0" * 16)
    installed = write_module(site / "flash_ext", hash_of(source_folder))
    assert loaded_in(source_folder, site) == str(installed)


@pytest.mark.parametrize("of_own", ["these", "0" * 16])
def test_the_module_in_the_folder_comes_before_one_of_other_sources(source_folder, site, of_own):
    """Also while its own sources are being edited, which the report tells then."""
    own = write_module(source_folder, hash_of(source_folder) if of_own == "these" else of_own)
    write_module(site / "flash_ext", "1" * 16)
    extension_of = json.loads(run(source_folder, site, "-m", "flash_ext.info", "--json"))["extension"]
    assert (extension_of["loaded"], extension_of["file"]) == (True, str(own))
    if of_own == "these":
        assert extension_of["message"] is None
    else:
        assert extension_of["message"].endswith(pip_of(source_folder))
        assert extension_of["message"] in run(source_folder, site, "-m", "flash_ext.info")


# ---- where nothing loads -------------------------------------------------------------------------------


def test_the_installed_module_is_of_other_sources(source_folder, site, monkeypatch):
    installed = write_module(site / "flash_ext", hash_of(source_folder))
    with (source_folder.parent / "csrc" / "kernel.cu").open("a") as kernel:
        kernel.write("// changed\n")
    monkeypatch.setattr(sys, "path", [str(site)])
    reasons = (f"the installed {installed} was built from other sources",)
    assert message_in(source_folder, reasons=reasons) == pip_of(source_folder)


def test_both_modules_are_for_another_torch(source_folder, site, monkeypatch):
    """Not an undefined symbol."""
    record = f', "sources": "{hash_of(source_folder)}"}}\n'.encode()
    for package in (source_folder, site / "flash_ext"):
        (package / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(OTHER_TORCH.replace(b"}\n", record))
    monkeypatch.setattr(sys, "path", [str(site)])
    reasons = (
        "flash_ext._C was built for torch 2.10.9+cu126",
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


def test_info_says_why_and_what_mends_it(source_folder, site):
    (source_folder / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(OTHER_TORCH)
    as_json = json.loads(run(source_folder, site, "-m", "flash_ext.info", "--json"))["extension"]
    assert as_json["loaded"] is False
    for text in (as_json["message"], run(source_folder, site, "-m", "flash_ext.info")):
        assert "2.10.9+cu126" in text and torch.__version__ in text and pip_of(source_folder) in text


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
