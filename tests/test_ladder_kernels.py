"""The ladder's CUDA kernels: their results on emulated warps, their build, and, with a GPU, their results
there.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_emulation import EMULATION, ROOT, copy_sources, replace_once

pytestmark = pytest.mark.xdist_group("ladder")  # one builds the program

KERNELS = Path("examples/ladder/kernels")
SHARED = "extern __shared__ __align__(128) unsigned char smem_raw[];"
# Barriers whose absence must be noticed: (what, file, text).
FAULTS = {
    1: ("K is read before it has come", "flash2.cuh", "ptx::cp_async_wait<1>();  // K of this step"),
    2: ("V is read before it has come", "flash2.cuh", "ptx::cp_async_wait<1>();  // V of this step"),
    3: ("maxima of the warps do not meet", "flash1.cuh", "  __syncthreads();\n#pragma unroll\n"
        "  for (int r = 0; r < 2 * T::kMBlocks; ++r) {\n    const int row"),
    4: ("shares are merged before all are there", "flash1.cuh", "    __syncthreads();\n    merge("),
    5: ("a slice is overwritten before it is merged", "flash1.cuh", "if (slice > 0) __syncthreads();"),
}  # fmt: skip
RUNS = 24


def switched(text: str, fault: int) -> str:
    """The statement at the beginning of the text, left out when the fault is on."""
    lead = text[: len(text) - len(text.lstrip())]
    return f"{lead}if (emu::fault != {fault}) {text.lstrip()}"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the emulation is built with g++, which is not here")
    folder = tmp_path_factory.mktemp("ladder")
    csrc = copy_sources(folder)
    shutil.copytree(ROOT / KERNELS, folder / KERNELS)
    for name in ("flash1.cuh", "flash2.cuh", "softmax.cuh"):
        replace_once(folder / KERNELS / name, SHARED, "unsigned char* const smem_raw = emu::smem;")
    for fault, (_, name, text) in FAULTS.items():
        replace_once(folder / KERNELS / name, text, switched(text, fault))
    # -O1: without it a run takes minutes. Fibers jump between stacks, which _FORTIFY_SOURCE takes for an
    # error.
    command = ["g++", "-std=c++20", "-O1", "-U_FORTIFY_SOURCE", f"-I{csrc}", f"-I{folder}"]
    command += [str(EMULATION / "ladder.cpp"), "-o", str(folder / "ladder")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "ladder"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_kernels_agree_with_float64(program: Path) -> None:
    done = run(program)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == f"0 of {RUNS} runs are wrong"
    assert len([line for line in lines if line.startswith("ok ")]) == RUNS


@pytest.mark.parametrize("fault", FAULTS, ids=[name for name, *_ in FAULTS.values()])
def test_missing_barriers_are_noticed(program: Path, fault: int) -> None:
    done = run(program, "--fault", str(fault))
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("FAIL") for line in done.stdout.splitlines())
