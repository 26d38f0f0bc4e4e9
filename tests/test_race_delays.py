"""Random pauses without a GPU: where they are, what a release has of them, and that a difference is found."""

from __future__ import annotations

import os
import re

import pytest
import torch

from tests.built import ROOT
from tests.harness import TARGETS
from tests.tools import race_delays
from tests.tools.planted import CONTROL, MUTANTS

CSRC = ROOT / "csrc"
CPU = TARGETS["cpu"]
PAUSE = "debug_delay();"


def lines_of(name: str) -> list[str]:
    return [line.strip() for line in (CSRC / name).read_text(encoding="utf-8").splitlines()]


def is_between(line: str) -> bool:
    """What may stand between a pause and its barrier."""
    return line.startswith("//") or line == "ptx::cp_async_wait<0>();"


@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        ("sm80/fwd/kernel.cuh", r"__syncthreads\(\);"),
        ("sm80/bwd/kernel.cuh", r"__syncthreads\(\);"),
        ("sm80/bwd_dq/kernel.cuh", r"__syncthreads\(\);"),
        ("sm80/bwd/persistent.cuh", r"__syncthreads\(\);"),
        ("sm80/bwd/warps.cuh", r"ptx::bar_(sync|arrive)\("),
    ],
)
def test_every_barrier_has_a_pause_in_front_and_behind(name: str, barrier: str):
    lines = lines_of(name)
    found = [at for at, line in enumerate(lines) if re.match(barrier, line)]
    assert found
    for at in found:
        before = next(line for line in reversed(lines[:at]) if not is_between(line))
        assert before == PAUSE and lines[at + 1] == PAUSE, f"{name}:{at + 1}"


def hopper_lines() -> dict[str, list[str]]:
    folder = CSRC / "sm90"
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.cuh"))]
    return {name: lines_of(f"sm90/{name}") for name in names}


def test_hopper_kernels_pause_before_every_wait():
    """Of mbarriers through one function; at named barriers; for the turn of another CTA."""
    lines = hopper_lines()
    tries = [name for name, text in lines.items() for line in text if "mbarrier_try_wait(" in line]
    assert tries == ["fwd/config.cuh"] * 2  # a debug build's loop and a release's
    named = [(name, at) for name, text in lines.items() for at, x in enumerate(text) if "bar_sync(" in x]
    assert len(named) >= 4
    for name, at in named:
        assert lines[name][at - 1] == PAUSE, f"{name}:{at + 1}"
    for name, function in (
        ("fwd/config.cuh", "void wait(uint32_t barrier"),
        ("bwd/dq_semaphore.cuh", "bool wait_dq_semaphore("),
        ("bwd/dq_semaphore.cuh", "int wait_dq_semaphores("),
        ("bwd/dq_pool_convert.cuh", "while (tells || tile < pool.all_tiles)"),
    ):
        at = next(at for at, line in enumerate(lines[name]) if function in line)
        body = next(i for i in range(at, at + 4) if lines[name][i].endswith("{"))
        assert lines[name][body + 1] == PAUSE, function
    # One lane waits for a round, and a pause needs all of them.
    asks = next(at for at, line in enumerate(lines["bwd/produce.cuh"]) if "wait_for_round(" in line)
    alone = max(at for at, line in enumerate(lines["bwd/produce.cuh"][:asks]) if line == "if (lane == 0) {")
    assert lines["bwd/produce.cuh"][alone - 1] == PAUSE and PAUSE not in lines["bwd/dq_pool.cuh"]


def test_hopper_kernels_end_with_an_error_where_a_wait_never_ends():
    """In a debug build; each loop that waits has its own count."""
    for name, count in (
        ("fwd/config.cuh", 1),
        ("bwd/dq_semaphore.cuh", 2),
        ("bwd/dq_pool.cuh", 1),
        ("bwd/dq_pool_convert.cuh", 1),
    ):
        text = "\n".join(hopper_lines()[name])
        assert text.count("__trap();  // an error instead of a hang") == count


def test_cases_reach_every_kind_of_kernel_with_modifiers():
    found = race_delays.modifier_cases()
    for deterministic in (False, True):
        chosen = [m for m in found if m.case.deterministic == deterministic]
        assert {m.case.head_dim for m in chosen} == {64, 128, 192, 256}
        dense = {m.mods for m in chosen if not m.case.is_packed}
        assert dense == {("bias_1hqk",), ("softcap30",), ("drop0.5",), ("bias_bhqk", "drop0.5")}


def test_every_wait_belongs_to_a_barrier_with_a_pause():
    for name in ("sm80/fwd/kernel.cuh", "sm80/bwd/kernel.cuh", "sm80/bwd_dq/kernel.cuh",
                 "sm80/bwd/persistent.cuh"):
        lines = lines_of(name)
        waits = [at for at, line in enumerate(lines) if line.startswith("ptx::cp_async_wait")]
        assert waits
        for at in waits:
            following = next(line for line in lines[at + 1 :] if not line.startswith("//"))
            assert following.startswith("__syncthreads();") and lines[at - 1] == PAUSE, f"{name}:{at + 1}"


def test_a_release_has_no_pauses():
    text = (CSRC / "common/debug_delay.cuh").read_text(encoding="utf-8")
    release = text.partition("#else")[2]
    assert "__device__ __forceinline__ void debug_delay() {}" in release
    assert "inline cudaError_t set_debug_delays(void*) { return cudaSuccess; }" in release
    assert race_delays.SEED_VARIABLE in text.partition("#else")[0]


def test_portable_kernels_wait_in_no_loop_of_their_own():
    """There is nothing that a time-out could end: no loop reads memory until another thread writes it."""
    for path in (CSRC / "sm80").rglob("*.cuh"):
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        assert not re.search(
            r"\bvolatile\s+(?!\()|ld\.(volatile|acquire)|atomicCAS|try_wait|while\s*\(\s*!", text
        ), path.name


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
    assert "#if !FLASH_EXT_DEBUG\n  // compute-sanitizer" in text and "bar.arrive %0, %1;" in text
    assert built[0]["env"]["FLASH_EXT_DEBUG"] == "1" and built[0]["cwd"] == folder
    assert all((folder / "csrc" / file).read_text() == text for file, text in planted.items())


def test_cases_hold_on_the_cpu_where_nothing_pauses(monkeypatch: pytest.MonkeyPatch):
    """All cases run, and what is compared has the same bits from call to call."""
    few = race_delays.small_cases()[::30]
    monkeypatch.setattr(race_delays, "small_cases", lambda: few)
    assert race_delays.compare(CPU, seeds=1) == 0
    names = [set(run()) for _, run in list(race_delays.runs(CPU))]
    assert {"out", "lse", "dk", "dv"} <= set.intersection(*names)
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
