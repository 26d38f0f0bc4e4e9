"""What is compiled again and what is copied from another build, by compilers that note what was asked."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import cache, environment, progress  # noqa: E402
from build_backend import compile as kernels_build  # noqa: E402

pytestmark = pytest.mark.everywhere

# An object is the text that was read. The compilers' version is a file, and so is the list of what they made.
COMPILER = """\
#!/bin/sh
case " $* " in *" --version "* | *" -dumpmachine "*) exec cat '{folder}/version' ;; esac
exec '{python}' -IS '{folder}/compiler.py' {pause} "$@"
"""
COMPILER_PROGRAM = """\
import os, re, sys, time
here, pause, words = os.path.dirname(__file__), float(sys.argv[1]), sys.argv[2:]
out = words[words.index("-o") + 1]
if "-shared" in words:
    objects = [item for item in words[:words.index("-o")] if item.endswith(".o")]
    open(out, "w").write("".join(open(item).read() for item in objects))
elif out != os.devnull:
    source = words[words.index("-c") + 1]
    with open(here + "/compiled", "a") as log:
        log.write(os.path.basename(source) + "\\n")
    read, text = [source], open(source).read()
    if "error" in text:
        print("no such thing")
        raise SystemExit(1)
    for name in re.findall(r'#include "(.*)"', text):
        read.append(os.path.join(os.path.dirname(source), name))
        text += open(read[-1]).read()
    time.sleep(pause)
    open(out, "w").write(text)
    open(words[words.index("-MF") + 1], "w").write(
        out + ": " + " \\\\\\n ".join(item.replace(" ", "\\\\ ") for item in read) + "\\n")
    print("said of " + os.path.basename(source))
"""
SOURCES = {
    "inst/one.cu": '#include "../both.h"\n', "inst/two.cu": '#include "../two.h"\n', "plain.cpp": "plain\n",
    "api/binding.cpp": '#include "../both.h"\n', "both.h": "both\n", "two.h": "two\n",
}  # fmt: skip
KERNELS, ALL = {"one.cu", "two.cu"}, {"one.cu", "two.cu", "plain.cpp", "binding.cpp"}


class Machine:
    """Stub compilers, a torch, a store, and folders with sources to build."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
        """The compilers of the folder are those that ``install`` has written there."""
        self.folder, self.monkeypatch, self.store = folder, monkeypatch, store
        self.torch = environment.TorchInstall(folder / "torch", "2.13.0", None, None)
        self.hints: list[str] = []
        for name in (
            "FLASH_EXT_DEBUG",
            "FLASH_EXT_LINEINFO",
            "FLASH_EXT_MUTANT",
            "FLASH_EXT_ARCHS",
            "TORCH_CUDA_ARCH_LIST",
            "CXXFLAGS",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("FLASH_EXT_CACHE", str(store))
        monkeypatch.setattr(progress, "PATIENCE", 60)
        monkeypatch.setattr(progress, "tell", self.hints.append)
        self.choose("toolkit")

    def choose(self, name: str) -> Path:
        home = self.folder / name
        self.toolkit = environment.Toolkit(home, "13.0", home / "libcudart_static.a")
        return home

    def install(self, name: str, pause: float = 0.0) -> None:
        home = self.choose(name)
        for path in (home / "bin" / "nvcc", self.folder / "g++"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(COMPILER.format(python=sys.executable, folder=self.folder, pause=pause))
            path.chmod(0o755)
        (self.folder / "compiler.py").write_text(COMPILER_PROGRAM)
        self.says("1")

    def says(self, version: str) -> None:
        (self.folder / "version").write_text(version + "\n")

    def sources(self, name: str, **changed: str) -> Path:
        """A project beside the store with the sources, all of them older than what is built from them."""
        root = self.store.parent / name
        for file, text in (SOURCES | changed).items():
            path = root / "csrc" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (time.time() - 100,) * 2)
        return root

    def build(self, root: Path) -> tuple[set[str], str]:
        """What was compiled, and the module."""
        tools = kernels_build.Tools(
            self.torch, self.toolkit, str(self.folder / "g++"), environment.find_ninja(), self.folder
        )
        self.monkeypatch.setattr(kernels_build.Tools, "find", classmethod(lambda cls: tools))
        self.monkeypatch.setattr(kernels_build, "ROOT", root)
        log = self.folder / "compiled"
        log.unlink(missing_ok=True)
        module = kernels_build.build_extension("0")
        try:
            compiled = set(log.read_text().split())
        except FileNotFoundError:  # nothing was compiled, or a build beside this one begins its own list
            compiled = set()
        return compiled, module.read_text()

    def entries(self) -> set[str]:
        return {path.name for path in self.store.glob("*/*")}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, str]]:
    """A machine on which one folder has been built from nothing, and the module of that build."""
    folder = tmp_path_factory.mktemp("a machine")
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(folder, patch, folder / "store")
        machine.install("toolkit")
        compiled, module = machine.build(machine.sources("first"))
        assert compiled == ALL and "plain" in module and machine.hints == []
        yield machine, module


@pytest.fixture
def machine(first, tmp_path, monkeypatch) -> Iterator[Machine]:
    """The same compilers with a copy of the store that the first build has filled."""
    same = Machine(first[0].folder, monkeypatch, tmp_path / "store")
    shutil.copytree(first[0].store, same.store)
    yield same
    same.install("toolkit")


def test_a_second_folder_with_the_same_sources_compiles_nothing(first, machine, capfd):
    """Nor with a toolkit in another folder: pip fetches one into a folder of its own for every build."""
    machine.install("fetched")
    root = machine.sources("second")
    assert machine.build(root) == (set(), first[1])
    (log,) = root.glob("build/*/inst/one.cu.o.log")
    assert log.read_text() == "said of one.cu\n"  # the gates read it
    assert "4 files were in" in capfd.readouterr().out
    table = json.loads((root / "build" / "resources.json").read_text())
    assert table["full_build"] is None  # nothing was measured


def test_a_header_decides_for_what_reads_it(machine):
    compiled, module = machine.build(machine.sources("second", **{"two.h": "changed\n"}))
    assert compiled == {"two.cu"} and "changed" in module
    # Both are kept: going back costs nothing.
    back, module = machine.build(machine.sources("third"))
    assert back == set() and "changed" not in module


def test_another_torch_compiles_the_binding_alone(machine):
    machine.torch = dataclasses.replace(machine.torch, version="2.14.0", root=machine.folder / "other torch")
    assert machine.build(machine.sources("second"))[0] == {"binding.cpp"}


def test_another_compiler_compiles_again(machine):
    machine.says("2")
    assert machine.build(machine.sources("second"))[0] == ALL


@pytest.mark.parametrize("variable, value", [("FLASH_EXT_ARCHS", "9.0a"), ("NVCC_APPEND_FLAGS", "-G")])
def test_what_changes_the_kernels_compiles_them_again(machine, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    compiled = machine.build(machine.sources("second"))[0]
    assert compiled == KERNELS if variable == "FLASH_EXT_ARCHS" else compiled >= KERNELS


@pytest.mark.parametrize("variable", ["FLASH_EXT_DEBUG", "FLASH_EXT_LINEINFO"])
def test_builds_without_the_cache(machine, monkeypatch, variable):
    """Assertions and line tables name the folder in which they were compiled."""
    monkeypatch.setenv(variable, "1")
    before = machine.entries()
    assert machine.build(machine.sources("second"))[0] == ALL
    assert machine.entries() == before


def test_flags_that_mean_this_processor_are_not_kept(machine, monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    for name in ("second", "third"):
        assert machine.build(machine.sources(name))[0] == ALL - KERNELS


def test_a_damaged_entry_is_compiled_again(first, machine):
    for entry in machine.store.glob("*/*"):
        entry.write_bytes(entry.read_bytes()[:-3])
    assert machine.build(machine.sources("second")) == (ALL, first[1])
    assert machine.build(machine.sources("third"))[0] == set()


def test_what_the_compiler_refuses_is_said_and_not_kept(machine, capfd):
    for name in ("second", "third"):
        with pytest.raises(subprocess.CalledProcessError):
            machine.build(machine.sources(name, **{"inst/one.cu": "error\n"}))
        assert "no such thing" in capfd.readouterr().out


def test_two_builds_at_once(machine):
    """Both compile, or one takes what the other made; neither reads half of it."""
    shutil.rmtree(machine.store)
    machine.install("toolkit", pause=0.05)
    roots = [machine.sources(f"folder{n}") for n in range(2)]
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'csrc')!r}]\n"
        "from pathlib import Path; import pytest\n"
        "from tests.packaging.test_build_cache import Machine\n"
        "with pytest.MonkeyPatch.context() as patch:\n"
        f"    machine = Machine(Path({str(machine.folder)!r}), patch, Path({str(machine.store)!r}))\n"
        "    machine.build(Path(sys.argv[1]))\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, root]) for root in roots]
    assert [process.wait(60) for process in both] == [0, 0]
    modules = [path.read_text() for root in roots for path in root.glob("build/*/_C.so")]
    assert len(modules) == 2 and modules[0] == modules[1]
    assert machine.build(machine.sources("third"))[0] == set()
    assert not list(machine.store.glob("*/*.part"))


# ---- the store -------------------------------------------------------------------------------------------


def test_a_store_of_somebody_else_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASH_EXT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    store, why_not = cache.folder()
    assert store is None and "another user" in why_not


def test_what_was_used_longest_ago_goes_first(tmp_path):
    for age in range(4):
        path = tmp_path / f"{age}" / "entry"
        path.parent.mkdir()
        path.write_bytes(bytes(100))
        os.utime(path, (time.time() - 1000 * age,) * 2)
    for name, age in (("old.part", 2 * 86400), ("new.part", 0)):
        (tmp_path / "0" / name).write_bytes(b"")
        os.utime(tmp_path / "0" / name, (time.time() - age,) * 2)
    cache.trim(tmp_path, 250)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert left == {"0/entry", "1/entry", "0/new.part"}


# ---- what somebody who waits sees ------------------------------------------------------------------------

FRONT_END = """\
import subprocess, sys
done = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]);"
                       "from build_backend import progress; progress.tell('a hint')", sys.argv[1]],
                      stdout=subprocess.PIPE, text=True, check=True)
open(sys.argv[2], "w").write(done.stdout)
"""


@pytest.mark.parametrize("to_terminal", [True, False])
def test_the_hint_goes_to_the_terminal_of_the_front_end(tmp_path, to_terminal):
    """pip keeps a build's output to itself; what it writes to a file stays as without a terminal."""
    ours, theirs = os.openpty()
    log = (tmp_path / "log").open("w")
    front_end = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, str(ROOT / "csrc"), str(tmp_path / "captured")],
        stdin=theirs,
        stdout=theirs if to_terminal else log,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    assert front_end.wait(60) == 0
    os.set_blocking(ours, False)
    try:
        shown = os.read(ours, 1000).decode()
    except BlockingIOError:
        shown = ""
    log.close()
    os.close(ours)
    os.close(theirs)
    captured = (tmp_path / "captured").read_text()
    assert ("a hint" in shown, "a hint" in captured) == (to_terminal, not to_terminal)
    assert (tmp_path / "log").read_text() == ""


def test_a_build_that_takes_long_gives_one_hint(machine, monkeypatch, capfd):
    """And each file has a line in a log. Without the cache all files are compiled again."""
    monkeypatch.setenv("FLASH_EXT_CACHE", "off")
    monkeypatch.setattr(progress, "PATIENCE", 0.001)
    before = machine.entries()
    assert machine.build(machine.sources("second"))[0] == ALL and machine.entries() == before
    (said,) = machine.hints
    assert re.match(r"flash_ext: compiling \d files of CUDA kernels and \d of C\+\+, .* about 1 min", said)
    lines = capfd.readouterr().out.splitlines()
    for name in ("inst/one.cu", "inst/two.cu", "plain.cpp", "api/binding.cpp"):
        assert [line for line in lines if line.startswith("[") and line.endswith(f" {name}")], lines


def test_a_library_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may load it while it is copied."""
    made, target = tmp_path / "made.so", tmp_path / "there" / "library.so"
    made.write_bytes(b"new" * 1000)
    target.parent.mkdir()
    target.write_bytes(b"old")
    copy, seen = shutil.copyfile, []

    def copy_slowly(source: Path, to: Path) -> None:
        Path(to).write_bytes(made.read_bytes()[:10])
        seen.append(target.read_bytes())
        copy(source, to)

    monkeypatch.setattr(shutil, "copyfile", copy_slowly)
    cache.place(made, target)
    assert seen == [b"old"] and target.read_bytes() == made.read_bytes()
    assert list(target.parent.iterdir()) == [target]
