"""Tests of the kill matrix: its planted bugs fit the sources, and its verdicts are fair. Needs no GPU."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.sources import CSRC, ROOT, count, squeezed
from tests.tools import mutants, planted


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


def test_every_planted_bug_has_run() -> None:
    (stored,) = (ROOT / "bench" / "results").glob("*/kill-matrix.json.gz")
    numbers = {mutant["number"] for mutant in json.loads(gzip.decompress(stored.read_bytes()))}
    assert {mutant.number for mutant in planted.MUTANTS} == numbers


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
