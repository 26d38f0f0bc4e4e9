"""Tests of the kill matrix: its planted bugs fit the sources, and its verdicts are fair. Needs no GPU."""

from __future__ import annotations

import collections
import gzip
import json
import re
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.sources import CSRC, ROOT, count, squeezed
from tests.tools import few_objects, mutants, planted


@pytest.mark.parametrize("mutant", planted.MUTANTS, ids=lambda m: str(m.number))
def test_planted_bugs_fit_the_sources(mutant: planted.Mutant) -> None:
    """Every edit finds its place exactly once and changes it."""
    for file, text in mutant.patched().items():
        source = (CSRC / file).read_text(encoding="utf-8")
        edits = [edit for edit in mutant.edits if edit.file == file]
        pairs = [(squeezed(edit.find), squeezed(edit.replace)) for edit in edits]
        assert all(count(source, find) == 1 and find != replace for find, replace in pairs)
        assert all(replace in squeezed(text) for _, replace in pairs)
        longer = sum(len(replace) - len(find) for find, replace in pairs)
        assert len(squeezed(text)) - len(squeezed(source)) == longer
    assert mutant.edits and mutant.first in mutants.FIRST_FILES


def test_planted_bugs_are_named_apart_and_only_there() -> None:
    """Each number stands for one bug, the kernels hold none, and an edit without its place is refused."""
    numbers = [mutant.number for mutant in (planted.CONTROL, *planted.MUTANTS)]
    assert len(set(numbers)) == len(numbers)
    suffixes = (".cpp", ".cu", ".cuh", ".h")
    sources = [path for path in CSRC.rglob("*") if path.suffix in suffixes]
    assert sources and not [path for path in sources if "MUTANT" in path.read_text(encoding="utf-8")]
    for nowhere in ("no such text", "const"):
        with pytest.raises(ValueError, match=r"mutant 1: csrc/api/ops.cpp holds (0|\d\d+) times"):
            planted.Mutant(1, "", "", (planted.Edit("api/ops.cpp", nowhere, ""),)).patched()


def included(path: Path, found: set[str]) -> set[str]:
    """A file below csrc/ and all that it includes."""
    name = path.relative_to(CSRC).as_posix()
    if name not in found:
        found.add(name)
        for target in re.findall(r'^\s*#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            if target != "build_record.h":  # which a build writes elsewhere
                included((path.parent / target).resolve(), found)
    return found


@pytest.mark.parametrize("archs", ["9.0a", "8.0 8.0+PTX"])
def test_objects_hold_the_bug(archs: str) -> None:
    """What is compiled of a mutant are files that read what the bug has changed; without Hopper, too."""
    for mutant in planted.MUTANTS:
        objects = few_objects.on_its_gpu(mutant.objects, archs)
        assert objects and len(set(objects)) == len(objects), mutant.number
        for name in objects:
            path = CSRC / name
            assert path.is_file() and path.suffix in (".cpp", ".cu"), (mutant.number, name)
            assert included(path, set()) & mutant.patched().keys(), (mutant.number, name)
    assert not any("_large" in name for name in few_objects.on_its_gpu(["inst/fwd_sm80_large.cu"], "8.0"))


COMPILED, OTHER = (
    f"sh cached.sh {kind} {name}.o -- {command} -c /a/0/csrc/{name} -o {name}.o"
    for kind, name, command in (
        ("nvcc", "inst/fwd.cu", "nvcc -gencode=arch=compute_90a,code=sm_90a -MF inst/fwd.cu.o.d"),
        ("cxx", "build_info.cpp", "g++ -O2 -I/a/0/build/x/generated -ffile-prefix-map=/a/0/= -isystem/a/01"),
    )
)
LINKED = "g++ -shared '-Wl,-rpath,$ORIGIN/lib' inst/bwd.cu.o inst/fwd.cu.o build_info.cpp.o -o _C.so -lc10"


def test_commands_of_another_folder() -> None:
    """Files are compiled as in the unchanged copy, below the own folder and without the store of objects."""
    names = ["build_info.cpp.o", "inst/fwd.cu.o"]
    found = few_objects.compile_commands([COMPILED, OTHER], names, Path("/a/0"), Path("/b c/7"))
    assert found == [
        ["g++", "-O2", "-I/b c/7/build/x/generated", "-ffile-prefix-map=/b c/7/=", "-isystem/a/01",
         "-c", "/b c/7/csrc/build_info.cpp", "-o", "build_info.cpp.o"],
        ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-MF", "inst/fwd.cu.o.d",
         "-c", "/b c/7/csrc/inst/fwd.cu", "-o", "inst/fwd.cu.o"],
    ]  # fmt: skip
    with pytest.raises(KeyError):
        few_objects.compile_commands([COMPILED], ["inst/no.cu.o"], Path("/a/0"), Path("/b"))


def test_own_objects_are_linked_before_the_others() -> None:
    linked = few_objects.link_command(LINKED, ["inst/fwd.cu.o", "build_info.cpp.o"], Path("/a/0/build/x"))
    assert linked == ["g++", "-shared", "-Wl,-rpath,$ORIGIN/lib", "inst/fwd.cu.o", "build_info.cpp.o",
                      "/a/0/build/x/inst/bwd.cu.o", "-o", "_C.so", "-lc10"]  # fmt: skip


def test_a_build_of_few_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By commands that copy a file or put objects together: own objects, the rest, the record, the module."""
    unchanged, own = tmp_path / "0", tmp_path / "7"
    there = unchanged / "build" / "x"
    names = ("inst/fwd_sm80_large.cu", "inst/bwd.cu", "build_info.cpp")
    for root in (unchanged, own):
        (root / "csrc" / "inst").mkdir(parents=True)
        for name in names:
            (root / "csrc" / name).write_text(f"{name} of {root.name}\n", encoding="utf-8")
    (there / "generated").mkdir(parents=True)
    (there / "cache.json").touch()
    (there / "inst").mkdir()
    (there / "inst" / "bwd.cu.o").write_text("bwd of 0\n", encoding="utf-8")
    old = few_objects.sources.content_hash(unchanged / "csrc")
    record = "".join(
        f'#define FLASH_EXT_BUILD_{name} "{value}"\n'
        for name, value in (("ARCHS", "9.0a"), ("VARIANT", "mutant0"), ("SOURCES", old))
    )
    record += f'#define FLASH_EXT_BUILD_JSON "{{\\"variant\\": \\"mutant0\\", \\"sources\\": \\"{old}\\"}}"\n'
    (there / few_objects.RECORD).write_text(record, encoding="utf-8")
    lines = [f"sh cached.sh cxx {name}.o -- cp {unchanged}/csrc/{name} {name}.o" for name in names]
    (tmp_path / "link.py").write_text(PUT_TOGETHER, encoding="utf-8")
    linker = shlex.join([sys.executable, str(tmp_path / "link.py")])
    lines.append(f"{linker} inst/bwd.cu.o inst/fwd_sm80_large.cu.o build_info.cpp.o -o _C.so")
    ninja = tmp_path / "ninja"
    ninja.write_text("\n".join(["#!/bin/sh", "cat <<'END'", *lines, "END", ""]), encoding="utf-8")
    ninja.chmod(0o755)
    monkeypatch.setattr(few_objects.environment, "find_ninja", lambda: str(ninja))

    assert few_objects.build(unchanged, own, ["inst/fwd_sm80_large.cu"], "mutant7", 2) == ""
    made = (own / few_objects.MODULE).read_text(encoding="utf-8")
    assert made == "inst/fwd_sm80_large.cu of 7\nbuild_info.cpp of 7\nbwd of 0\n"
    new = few_objects.sources.content_hash(own / "csrc")
    own_record = (own / "build" / "x" / few_objects.RECORD).read_text(encoding="utf-8")
    assert new != old and own_record == record.replace("mutant0", "mutant7").replace(old, new)

    (own / "csrc" / "inst" / "fwd_sm80_large.cu").unlink()
    problem = few_objects.build(unchanged, own, ["inst/fwd_sm80_large.cu"], "mutant7", 2)
    assert "fwd_sm80_large.cu" in problem and "No such file" in problem


PUT_TOGETHER = """
import sys
from pathlib import Path
*objects, _, made = sys.argv[1:]
Path(made).write_text("".join(Path(name).read_text() for name in objects))
"""


# Not in the stored matrices. One that has them all takes their place, and then none is left here.
YET_TO_RUN = {1202, 1304, 2101, 2103, 2105}


def test_every_other_planted_bug_has_run() -> None:
    stored = (ROOT / "bench" / "results").glob("*/kill-matrix.json.gz")
    numbers = {
        mutant["number"] for file in stored for mutant in json.loads(gzip.decompress(file.read_bytes()))
    }
    assert {mutant.number for mutant in planted.MUTANTS} - YET_TO_RUN == numbers


def test_tests_run_from_every_folder_with_kernels_the_likely_ones_first() -> None:
    stems = collections.Counter(
        path.stem for folder in mutants.TESTED_IN for path in (ROOT / "tests" / folder).glob("test_*.py")
    )
    assert set(stems.values()) == {1}  # files are named by their stems
    for mutant in planted.MUTANTS:
        files = mutants.files_of_tests(mutant.first)
        assert Path(files[0]).stem == f"test_{mutant.first}" and files[-1] == "tests/attention/test_fuzz.py"
        assert len(files) == len(set(files)) == len(stems) and all((ROOT / file).is_file() for file in files)


def test_a_copy_has_what_its_tests_import() -> None:
    """Of the folders here: bench, say."""
    files = [path for name in ("", *mutants.TESTED_IN) for path in (ROOT / "tests" / name).glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.M))
    assert {name for name in imported if (ROOT / name).is_dir()} <= set(mutants.COPIED)


def test_gpus_are_shared_out() -> None:
    """Never more processes on one than it has room for, and two GPUs for who wants two."""
    gpus, lock = mutants.Gpus(["0", "5", "7"], 2), threading.Lock()
    running: collections.Counter[str] = collections.Counter()
    most, together = 0, threading.Barrier(6)

    def work(count: int, waits: bool) -> None:
        nonlocal most
        with gpus.take(count) as environment:
            taken = environment["CUDA_VISIBLE_DEVICES"].split(",")
            with lock:
                running.update(taken)
                most = max(most, *running.values())
            assert len(set(taken)) == count
            if waits:
                together.wait(60)  # six of them at once
            with lock:
                running.subtract(taken)

    asked = [(1, True)] * 6 + [(n % 3 + 1, False) for n in range(30)]
    threads = [threading.Thread(target=work, args=each, daemon=True) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 2 and not any(running.values()) and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("full", [False, True])
def test_mutants_are_built_and_run_side_by_side(
    full: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The unchanged copy is built before all others. One is tested while others are built, and all come into
    one file, whatever becomes of them."""
    first, second, third, wide = (m.number for m in planted.MUTANTS if m.number in (101, 201, 301, 2301))
    tested, held = threading.Event(), []
    begun, control = [], threading.Event()

    def build(mutant: planted.Mutant, compilers: int, full_asked: bool) -> str:
        assert full_asked == full and compilers > 0
        begun.append(mutant)
        if mutant is planted.CONTROL:
            time.sleep(0.1)
            control.set()
        assert control.is_set()
        if mutant.number == third:
            assert tested.wait(60)  # builds go on when the first mutant has been tested
        return "no compiler" if mutant.number == second else ""

    def run(mutant: planted.Mutant, seed: int, environment: dict[str, str]) -> mutants.Outcome:
        tested.set()
        return mutants.Outcome(mutant.number, "killed", environment["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(mutants, "FOLDER", tmp_path)
    monkeypatch.setattr(mutants, "build", build)
    monkeypatch.setattr(mutants, "run", run)
    monkeypatch.setattr(mutants, "hold_against_control", lambda *given: held.append(given[2]))
    arguments = f"--gpus 3 4 --jobs 2 --only {first} {second} {third} {wide}" + full * " --full"
    monkeypatch.setattr(sys, "argv", ["mutants", *arguments.split()])
    assert mutants.main() == 1
    assert begun[0] is planted.CONTROL and begun.count(planted.CONTROL) == 1 and len(begun) == 5
    stored = {x["number"]: x for x in json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))}
    assert {number: x["status"] for number, x in stored.items()} == {
        first: "killed", second: "not built", third: "killed", wide: "killed",
    }  # fmt: skip
    assert stored[wide]["test"] == held[0]["CUDA_VISIBLE_DEVICES"] == "3,4"


def test_nothing_is_built_behind_an_unchanged_copy_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = []
    monkeypatch.setattr(mutants, "FOLDER", tmp_path)
    monkeypatch.setattr(mutants, "build", lambda mutant, *given: built.append(mutant) or "no compiler")
    monkeypatch.setattr(sys, "argv", ["mutants", "--gpus", "0", "--build-only"])
    with pytest.raises(SystemExit, match="no compiler"):
        mutants.main()
    assert built == [planted.CONTROL]


def test_a_fresh_copy_keeps_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutants, "COPIED", ("README.md",))
    (tmp_path / "build").mkdir()
    (tmp_path / "README.md").write_text("an older one", encoding="utf-8")
    mutants.plant(planted.CONTROL, tmp_path, kept=("build",))
    assert (tmp_path / "build").is_dir()
    assert (tmp_path / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()
    mutants.plant(planted.CONTROL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_what_a_run_says_about_a_mutant() -> None:
    """A kill needs a failing test; time that is up and a run without tests are neither kill nor proof."""
    b = "tests/attention/test_masks.py::test_b[x-1]"
    started = f"tests/attention/test_masks.py::test_a PASSED [ 1%]\n{b} "
    expected = {
        (1, started + "FAILED [ 2%]\n"): ("killed", b),
        (1, started + f"\nFAILED {b} - AssertionError: 1"): ("killed", b),
        (3, started + "\n!!! Exit: CUDA context lost in\n"): ("killed", b),
        (-11, started): ("killed", b),
        (None, started): (f"survived the first {mutants.RUN_SECONDS} s", b),
        (0, started + "PASSED\n"): ("survived", ""),
        (0, started.replace("PASSED", "SKIPPED") + "SKIPPED\n"): ("not run", b),
        (None, "no test yet"): ("not run", ""),
        (4, "no module named torch"): ("not run", ""),
        (-9, ""): ("not run", ""),
    }
    for (code, output), (status, test) in expected.items():
        outcome = mutants.verdict(101, code, output, 1.0)
        assert (outcome.status, outcome.test) == (status, test), output
