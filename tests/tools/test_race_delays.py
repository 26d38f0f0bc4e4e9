"""Random pauses without a GPU: which cases they run in, and that a difference is found."""

from __future__ import annotations

import os

import pytest
import torch

from tests.harness import TARGETS
from tests.sources import CSRC, count
from tests.tools import race_delays
from tests.tools.planted import CONTROL, MUTANTS

CPU = TARGETS["cpu"]


def test_cases_reach_every_kind_of_kernel_with_modifiers():
    found = race_delays.modifier_cases()
    for deterministic in (False, True):
        chosen = [m for m in found if m.deterministic == deterministic]
        assert {m.head_dim for m in chosen} == {64, 128, 192, 256}
        dense = {m.mods for m in chosen if not m.is_packed}
        assert dense == {("bias_1hqk",), ("softcap30",), ("drop0.5",), ("bias_bhqk", "drop0.5")}


@pytest.mark.parametrize("number", [0, 701, 702, 703, 704])
def test_the_copy_that_is_built(number: int, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Debug variant, the pair's barrier as in a release, the planted bug where one is asked for."""
    built = []
    monkeypatch.setattr(race_delays.mutants, "ROOT", tmp_path)
    monkeypatch.setattr(race_delays.mutants, "COPIED", ())
    monkeypatch.setattr(race_delays.subprocess, "run", lambda command, **options: built.append(options))
    mutant = next(m for m in (CONTROL, *MUTANTS) if m.number == number)
    planted = mutant.patched()

    def plant(mutant, folder):
        (folder / "csrc/ptx").mkdir(parents=True)
        (folder / "csrc/ptx/sm80.cuh").write_text((CSRC / "ptx/sm80.cuh").read_text())
        for file, text in planted.items():
            (folder / "csrc" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "csrc" / file).write_text(text)

    monkeypatch.setattr(race_delays.mutants, "plant", plant)
    folder = race_delays.build(mutant)
    text = (folder / "csrc/ptx/sm80.cuh").read_text()
    assert count(text, "#if !FLASH_EXT_DEBUG // compute-sanitizer") == 1 and "bar.arrive %0, %1;" in text
    assert built[0]["env"]["FLASH_EXT_DEBUG"] == "1" and built[0]["cwd"] == folder
    assert all((folder / "csrc" / file).read_text() == text for file, text in planted.items())


def test_cases_hold_on_the_cpu_where_nothing_pauses(monkeypatch: pytest.MonkeyPatch):
    """Cases of every kind run, and what is compared has the same bits from call to call."""
    for kind, step in {"small_cases": 60, "few_query_cases": 5, "modifier_cases": 9}.items():
        few = getattr(race_delays, kind)()[::step]
        monkeypatch.setattr(race_delays, kind, lambda few=few: few)
    names, runs = [], race_delays.runs

    def noted(target):
        for name, run in runs(target):

            def kept(run=run):
                names.append(set(found := run()))
                return found

            yield name, kept

    monkeypatch.setattr(race_delays, "runs", noted)
    assert race_delays.compare(CPU, seeds=1) == 0
    assert {"out", "lse"} <= set.intersection(*names)
    assert {"out", "lse"} in names  # over a cache nothing has a gradient
    assert {"out", "lse", "dk", "dv"} <= set.intersection(*(found for found in names if len(found) > 2))
    assert any("dq" in found for found in names) and not all("dq" in found for found in names)


def test_a_bit_that_a_seed_changes_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def unlucky() -> dict[str, torch.Tensor]:
        wrong = os.environ[race_delays.SEED_VARIABLE] == "7"
        return {"out": torch.zeros(4), "dk": torch.tensor([1.0, 2.0 if wrong else 3.0])}

    assert list(race_delays.differences(unlucky, range(1, 9))) == ["seed 7: dk"]
    assert os.environ[race_delays.SEED_VARIABLE] == "0"
    monkeypatch.setattr(
        race_delays, "runs", lambda target: iter([("steady", lambda: {}), ("unlucky", unlucky)])
    )
    assert race_delays.compare(CPU, seeds=6) == 0
    assert race_delays.compare(CPU, seeds=7) == 1
    assert "DIFFERS unlucky, seed 7: dk" in capsys.readouterr().out


def test_a_release_build_is_no_answer(capsys: pytest.CaptureFixture):
    assert race_delays.run_here(["sm80"], 1) == 2
    assert "release build, which pauses nowhere" in capsys.readouterr().err


def test_a_planted_bug_must_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """With --mutant the exit status says whether the pauses found it."""
    monkeypatch.setattr(race_delays, "folder_of", lambda mutant: tmp_path)
    for code, meant in ((1, 0), (0, 1), (3, 3)):
        done = race_delays.subprocess.CompletedProcess([], code)
        monkeypatch.setattr(race_delays.subprocess, "run", lambda *_, done=done, **__: done)
        assert race_delays.main(["--run-only", "--mutant", "702"]) == meant
        assert race_delays.main(["--run-only"]) == code
