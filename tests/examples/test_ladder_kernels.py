"""The ladder's CUDA kernels: their results on emulated warps, their build, and, with a GPU, their results
there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.ladder import native
from tests.kept import compiled
from tests.kernels.test_emulation import EMULATION, copy_sources
from tests.sources import ROOT, replace_in

pytestmark = pytest.mark.xdist_group("ladder")  # one builds the program

KERNELS = Path("examples/ladder/kernels")
SHARED = "extern __shared__ __align__(128) unsigned char smem_raw[];"
# Barriers whose absence must be noticed: (what, file, text, short runs that notice it).
DIVIDED, FIRST, FIRST_BACKWARD = "flash2 64, divided each step", "flash1 128, 32 x 128", "flash1 backward 128"
FAULTS = {
    1: ("K is read before it has come", "flash2.cuh", "ptx::cp_async_wait<1>();  // K of this step", DIVIDED),
    2: ("V is read before it has come", "flash2.cuh", "ptx::cp_async_wait<1>();  // V of this step", DIVIDED),
    3: ("maxima of the warps do not meet", "flash1.cuh", "  __syncthreads();\n#pragma unroll\n"
        "  for (int r = 0; r < 2 * T::kMBlocks; ++r) {\n    const int row", FIRST),
    4: ("shares are merged before all are there", "flash1.cuh", "    __syncthreads();\n    merge(", FIRST),
    5: ("a slice is overwritten before it is merged", "flash1.cuh", "if (slice > 0) __syncthreads();", FIRST),
    6: ("shares of dQ are merged before all are there", "flash1_backward.cuh",
        "    __syncthreads();\n    merge(", FIRST_BACKWARD),
    7: ("keys are replaced while they are in use", "flash1_backward.cuh",
        "__syncthreads();  // the key block before is done with shared memory", FIRST_BACKWARD),
    8: ("dQ is formed before all dS are there", "flash2_backward.cuh",
        "__syncthreads();  // dS of all warps", "flash2 backward 64"),
    9: ("a block of queries is read before it has come", "flash2_backward.cuh",
        "__syncthreads();  // this block is there, and the one before is done with shared memory",
        "flash2 backward, far below 0"),
    10: ("dK is put over keys that are in use", "flash2_backward.cuh",
         "__syncthreads();  // K, which all read for dQ", "flash2 backward 128"),
    11: ("keys beyond the end weigh exp(0 - lse)", "backward.cuh",
         "if (keys < T::kBlockN) hide_keys(", "flash2 backward, far below 0"),
}  # fmt: skip
RUNS = 33


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
    for name in ("flash1.cuh", "flash1_backward.cuh", "flash2.cuh", "flash2_backward.cuh", "softmax.cuh"):
        replace_in(folder / KERNELS / name, SHARED, "unsigned char* const smem_raw = emu::smem;")
    for fault, (_, name, text, _) in FAULTS.items():
        replace_in(folder / KERNELS / name, text, switched(text, fault))
    # -O1: without it a run takes minutes. Fibers jump between stacks, which _FORTIFY_SOURCE takes for an
    # error.
    command = ["g++", "-std=c++20", "-O1", "-U_FORTIFY_SOURCE", f"-I{csrc}", f"-I{folder}"]
    done = compiled([*command, str(EMULATION / "ladder.cpp")], folder / "ladder")
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
    done = run(program, "--fault", str(fault), FAULTS[fault][3])
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("FAIL") for line in done.stdout.splitlines())


# ---- the library


@pytest.fixture(scope="module")
def built() -> None:
    """Made by the package's own graph, on any machine that can build the package."""
    sys.path.insert(0, str(ROOT / "csrc"))
    from build_backend import environment

    if environment.find_toolkit()[0] is None:
        pytest.skip("no CUDA toolkit")
    native.build()


def test_the_kernels_build_without_spills(built: None) -> None:
    table = json.loads((ROOT / "build" / "ladder_resources.json").read_text(encoding="utf-8"))
    assert table["warnings"] == []
    names = {kernel["name"].split("<")[0].split("::")[-1] for kernel in table["kernels"]}
    backward = {"stats_kernel", "flash1_backward_kernel", "flash2_backward_kernel", "round_kernel"}
    assert names == {"flash1_kernel", "flash2_kernel", "softmax_kernel"} | backward
    assert all(kernel["stack"] == kernel["spill_stores"] == 0 for kernel in table["kernels"])


def test_the_library_refuses_in_words(built: None) -> None:
    """Before any launch, so that no GPU is needed."""
    found = native.library()
    pointers, call = [None] * 4, [1, 8, 8]
    assert found.ladder_flash2(*pointers, None, *call, 80, 1.0, 0, 0, None) == b"head_dim must be 64 or 128"
    assert found.ladder_flash2(*pointers, None, *call, 64, 0.0, 0, 0, None).endswith(b"must be positive")
    refusal = found.ladder_flash1(*pointers, *pointers[:3], *call, 64, 1.0, 48, 48, None)
    assert refusal == b"no kernel of these sizes"
    refusal = found.ladder_backward(*[None] * 11, *call, 80, 1.0, 2, None)
    assert refusal == b"head_dim must be 64 or 128"
    assert found.ladder_backward(*[None] * 11, *call, 64, 1.0, 3, None) == b"version must be 1 or 2"
    assert found.ladder_softmax(None, None, 1, 6, 0, None) == b"the length of a row must be a multiple of 4"
    assert found.ladder_softmax(None, None, 1, 1 << 20, 3, None) == b"a row is larger than shared memory"
    assert found.ladder_softmax(None, None, 1, 8, 9, None) == b"no such kind of softmax"


def test_no_package_has_the_library() -> None:
    """It stands beside the sources of an example, which wheels leave out."""
    assert native.LIBRARY.is_relative_to(ROOT / "examples")
    shipped = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("packages = [")[2]
    assert "examples" not in shipped.partition("]")[0]
