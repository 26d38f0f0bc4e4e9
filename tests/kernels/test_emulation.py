"""Three kernels on warps, barriers and copies emulated on a CPU, against models in float64.

They are the gradient of a bias, the forward for few queries, and the same over a cache. Needs g++ and no GPU.
Their own sources are compiled, after a few edits of a copy: tests/tools/emulation/sm80.cuh replaces the
header of PTX, and what is declared in shared memory becomes static. All cases, with an option of the
programs, take minutes:

    python -m tests.kernels.test_emulation bwd_bias --all
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kept import compiled
from tests.sources import ROOT, replace_in

pytestmark = pytest.mark.xdist_group("emulation")  # one builds the programs

EMULATION = ROOT / "tests" / "tools" / "emulation"

# Edits of the copied sources: (file, text there, what replaces it). Every text must be found once: a change
# of the sources that the emulation has to follow fails here, with the text, and not in the compiler.
EDITS = [
    ("sm80/bwd_bias/kernel.cuh", "extern __shared__ __align__(128) unsigned char smem_raw[];",
     "unsigned char* const smem_raw = emu::smem;"),
    ("sm80/bwd_bias/kernel.cuh", "__shared__ BiasSearch search;", "static BiasSearch search;"),
    ("sm80/bwd_bias/kernel.cuh", "__shared__ DropKeys drop_keys[2];", "static DropKeys drop_keys[2];"),
    ("sm80/split_kv/kernel.cuh", "extern __shared__ __align__(128) unsigned char smem[];",
     "unsigned char* const smem = emu::smem;"),
    ("sm80/split_kv/kernel.cuh", "  __shared__ RowState states", "  static RowState states"),
    ("sm80/split_kv/cached.cuh", "  __shared__ RowState states", "  static RowState states"),
    ("sm80/split_kv/mod.cuh", "  __shared__ RowState states", "  static RowState states"),
    ("sm80/split_kv/mod.cuh", "  __shared__ ModTile tile;", "  static ModTile tile;"),
    ("sm80/split_kv/cached_mod.cuh", "  __shared__ RowState states", "  static RowState states"),
    ("sm80/split_kv/cached_mod.cuh", "  __shared__ ModTile tile;", "  static ModTile tile;"),
    ("sm80/split_kv/cached_mod.cuh", "  __shared__ CachedWork x;", "  static CachedWork x;"),
    ("sm80/split_kv/cached_mod.cuh", "  __shared__ PartRule rule;", "  static PartRule rule;"),
    ("sm80/split_kv/quantized.cuh", "    __shared__ float factors_of_rows",
     "    static float factors_of_rows"),
    ("sm80/split_kv/quantized.cuh", "    __shared__ __align__(8) float factors_of_keys",
     "    static float factors_of_keys"),
    ("sm80/split_kv/cached.cuh", "  __shared__ MergeShares<kPasses> shares",
     "  static MergeShares<kPasses> shares"),
    ("sm80/split_kv/merge.cuh", "  __shared__ MergeShares<kMergePasses> shares",
     "  static MergeShares<kMergePasses> shares"),
    ("common/tiles.cuh", """\
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\\n" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");""",
     "  ptx::store_words(to, w);"),
    ("common/tiles.cuh",
     """    asm volatile("st.shared.b32 [%0], %1;\\n" ::"r"(row + (lane % 4) * 4), "r"(r[i]) : "memory");""",
     "    ptx::store_word(row + (lane % 4) * 4, r[i]);"),
    # store_tile is not called by this kernel, and must compile.
    ("common/tiles.cuh", """\
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\\n"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at));""",
     "    emu::fail(\"store_tile is not emulated\"), (void)at, (void)w;"),
]  # fmt: skip
# Mistakes of synchronisation, by number; each is in the program, and `--fault` turns it on.
FAULTS = {
    1: ("one wait too few", "sm80/bwd_bias/kernel.cuh", "ptx::cp_async_wait<kAhead - 1>();",
        "emu::fault == 1 ? ptx::cp_async_wait<kAhead>() : ptx::cp_async_wait<kAhead - 1>();"),
    2: ("no barrier between slices", "sm80/bwd_bias/kernel.cuh", "__syncthreads();  // this slice is there",
        "if (emu::fault != 2) __syncthreads();  // this slice is there"),
    3: ("no barrier before sums of warps", "sm80/bwd_bias/kernel.cuh", """\
  __syncthreads();
  debug_delay();
  if (g.sum_rows && g.sum_cols) {""", """\
  if (emu::fault != 3) __syncthreads();
  debug_delay();
  if (g.sum_rows && g.sum_cols) {"""),
    4: ("one wait too few for keys", "sm80/split_kv/kernel.cuh", "ptx::cp_async_wait<kStages - 2>();",
        "emu::fault == 4 ? ptx::cp_async_wait<kStages - 1>() : ptx::cp_async_wait<kStages - 2>();"),
    5: ("output over keys in use", "sm80/split_kv/kernel.cuh",
        "__syncthreads();  // the rings are left by all",
        "if (emu::fault != 5) __syncthreads();  // the rings are left by all"),
    6: ("parts weighted alike", "sm80/split_kv/merge.cuh",
        "const float factor = s.factor(all.largest, scale);",
        "const float factor = emu::fault == 6 ? 1.f : s.factor(all.largest, scale);"),
    7: ("no barrier before a table's sums", "sm80/bwd_bias/kernel.cuh", """\
  __syncthreads();
  debug_delay();
  float* const entries""", """\
  if (emu::fault != 7) __syncthreads();
  debug_delay();
  float* const entries"""),
    8: ("a part too many is merged", "sm80/split_kv/cached.cuh", "packed_row, parts.count, shares);",
        "packed_row, parts.count + (emu::fault == 8), shares);"),
    9: ("pages in their own order", "common/kv_rows.cuh", "? table[divide(row, c.page_size)] : page",
        "? int32_t(emu::fault == 9 ? divide(row, c.page_size) : table[divide(row, c.page_size)]) : page"),
    10: ("rows behind the length", "sm90/fwd_cached/pieces.cuh", "const int there = min(",
         "const int there = emu::fault == 10 ? rows : min("),
    11: ("a tree one key too early", "common/mask_words.cuh", "const int at = col0 - score_mod.shift();",
         "const int at = col0 - score_mod.shift() + (emu::fault == 11);"),
    12: ("ids of another sequence", "common/mod_scores.cuh", "s.seq.b * s.m.document_k.batch_stride",
         "(emu::fault == 12 ? 0 : s.seq.b) * s.m.document_k.batch_stride"),
}  # fmt: skip
PROGRAM_OF = {1: "bwd_bias", 2: "bwd_bias", 3: "bwd_bias", 4: "fwd_split", 5: "fwd_split", 6: "fwd_split",
              7: "bwd_bias", 8: "fwd_cached", 9: "fwd_cached", 10: "fwd_cached",
              11: "fwd_cached", 12: "fwd_cached"}  # fmt: skip
RUNS = {
    "bwd_bias": 20,
    "fwd_split": 6,
    "fwd_cached": 16,
}  # of the few cases that each program takes without --all


def copy_sources(folder: Path) -> Path:
    """A copy of csrc that g++ compiles, with the faults in it, turned off."""
    csrc = folder / "csrc"
    for part in ("common", "plan", "ptx", "sm80", "sm90"):
        shutil.copytree(ROOT / "csrc" / part, csrc / part)
    for header in (ROOT / "csrc").glob("*.h"):
        shutil.copy(header, csrc)
    shutil.copy(EMULATION / "sm80.cuh", csrc / "ptx")
    shutil.copy(EMULATION / "cuda_shim.h", csrc / "ptx")
    shutil.copy(ROOT / "csrc" / "dtype.cuh", csrc)
    for header in ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h"):
        (csrc / header).write_text("#pragma once\n", encoding="utf-8")
    (csrc / "common" / "debug_delay.cuh").write_text(
        "#pragma once\nnamespace flash_ext { inline void debug_delay() {} }\n", encoding="utf-8"
    )
    for name, old, new in EDITS:
        replace_in(csrc / name, old, new)
    for _, name, old, new in FAULTS.values():
        replace_in(csrc / name, old, new)
    return csrc


def build(folder: Path, name: str, csrc: Path | None = None) -> Path:
    """The program tests/tools/emulation/NAME.cpp of an empty folder, or one that has copied sources."""
    if shutil.which("g++") is None:
        pytest.skip("the emulation is built with g++, which is not here")
    csrc, program = csrc or copy_sources(folder), folder / name
    # Fibers jump between stacks, which the checks of _FORTIFY_SOURCE take for an error.
    command = ["g++", "-std=c++20", "-O1", "-U_FORTIFY_SOURCE", f"-I{csrc}", str(EMULATION / f"{name}.cpp")]
    command += map(str, sorted((csrc / "plan").glob("*.cpp")) if name == "fwd_cached" else [])
    done = compiled(command, program)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build(tmp_path_factory.mktemp(name), name) for name in RUNS}


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", RUNS)
def test_kernels_agree_with_float64(programs: dict[str, Path], name: str) -> None:
    done = run(programs[name])
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == f"0 of {RUNS[name]} runs are wrong"
    assert len([line for line in lines if line.startswith("ok ")]) == RUNS[name]


@pytest.mark.parametrize("fault", FAULTS, ids=[name for name, *_ in FAULTS.values()])
def test_planted_faults_are_noticed(programs: dict[str, Path], fault: int) -> None:
    """Noticed as wrong results, or as a state that must not be; a crash would say nothing."""
    done = run(programs[PROGRAM_OF[fault]], "--fault", str(fault))
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(line.startswith("FAIL") for line in done.stdout.splitlines())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        built = build(Path(where), sys.argv[1])
        sys.exit(subprocess.run([str(built), *sys.argv[2:]], check=False).returncode)
