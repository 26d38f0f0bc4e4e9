"""Tests of the tests: planted bugs in the kernels, and which test notices each.

``FLASH_EXT_MUTANT=n`` at build time compiles the bug ``#if FLASH_EXT_MUTANT == n`` into an otherwise normal
build. This program builds the mutants below, runs the GPU tests against each until the first failure, and
prints the kill matrix. A mutant that survives is a missing test.

    python -m tests.mutants --list                  what each one does
    python -m tests.mutants                         build all, run all (needs a GPU and the CUDA toolkit)
    python -m tests.mutants --only 301 701 --jobs 2
    python -m tests.mutants --build-only            then --run-only: the two halves in separate commands

Each mutant gets build/mutants/<n>/ with a copy of the package and the tests, so the working tree stays as it
is. Results are added to build/mutants/matrix.json. Exit status: 0 all killed, 1 some survived.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mutants"
RUN_SECONDS = 240  # a mutant that hangs the tests for this long is noticed, too

# Quickest to notice most bugs first.
TEST_FILES = ("lists", "masks", "varlen", "values", "layout", "autograd", "races", "system", "sizes")


@dataclass(frozen=True)
class Mutant:
    """One planted bug. number: of the macro; name: in the catalogue; place: the file with the hook."""

    number: int
    name: str
    place: str
    bug: str
    needs_gpus: int = 1


MUTANTS = (
    Mutant(
        101,
        "M1 causal diagonal + 1",
        "common/attn_mod.cuh",
        "visible(), kv_blocks() and q_blocks() use reach_right + 1 when reach_right is 0",
    ),
    Mutant(
        102,
        "M1 causal diagonal - 1",
        "common/attn_mod.cuh",
        "visible() uses reach_right - 1 when reach_right is 0, so a row misses its own key",
    ),
    Mutant(
        201,
        "M2 last partial key tile unmasked",
        "common/attn_mod.cuh",
        "kind() leaves out the test last_col < seqlen_k: zero-filled keys take part with score 0",
    ),
    Mutant(
        301,
        "M3 newest key dropped",
        "common/attn_mod.cuh",
        "visible() of row seqlen_q - 1 ends one key early; all other rows are right",
    ),
    Mutant(
        401,
        "M4 window left + 1",
        "common/attn_mod.cuh",
        "visible() uses reach_left + 1 when the window is limited to the left",
    ),
    Mutant(
        501,
        "M5 -inf minus -inf not guarded",
        "common/softmax.cuh",
        "offset() returns row_max * scale_log2 also for row_max = -inf",
    ),
    Mutant(
        601,
        "M6 rescale skipped",
        "sm80/fwd.cuh",
        "softmax_step() does not multiply acc_o by factor although raise() returned true",
    ),
    Mutant(
        701,
        "M7 barrier removed: forward loop",
        "sm80/fwd.cuh",
        "no __syncthreads() after cp_async_wait<0>() at the head of the key loop",
    ),
    Mutant(
        702,
        "M7 barrier removed: backward loop",
        "sm80/bwd.cuh",
        "no __syncthreads() after cp_async_wait<0>() at the head of walk_queries()",
    ),
    Mutant(
        703,
        "M7 barrier removed: P of a pair",
        "sm80/bwd.cuh",
        "no bar_sync/bar_arrive between the two warps of a pair",
    ),
    Mutant(
        704,
        "M7 barrier removed: deterministic dQ loop",
        "sm80/bwd_q.cuh",
        "no __syncthreads() after cp_async_wait<0>() in the key loop",
    ),
    Mutant(
        901,
        "M9 32-bit query offset",
        "common/tiles.cuh or wherever row_pointer() is",
        "row_pointer() adds batch, row and head offsets as int32",
    ),
    Mutant(
        1001,
        "M10 dout read with the strides of out",
        "passes/bwd_passes.cuh",
        "bwd_preprocess_kernel reads dout with p.out's strides and alignment",
    ),
    Mutant(
        1101,
        "M11 lse in base 2",
        "common/softmax.cuh",
        "finish() writes max + log2(sum) instead of the natural logarithm",
    ),
    Mutant(
        1401,
        "M14 tail of V not zero-filled",
        "common/tiles.cuh",
        "load_tile() skips rows at or beyond `rows` instead of writing zeros",
    ),
    Mutant(
        1601,
        "M16 deterministic flag ignored",
        "path_sm80.cpp",
        "bwd_workspace() asks for dq_accum whatever `deterministic` is",
    ),
    Mutant(
        1801, "M18 grouped heads by modulo", "sm80/fwd.cuh", "h_k = w.h % num_heads_k instead of w.h / group"
    ),
    Mutant(
        2301,
        "M23 device guard removed",
        "api.cpp",
        "no OptionalDeviceGuard in fwd_gpu() and bwd_gpu()",
        needs_gpus=2,
    ),
    Mutant(
        2501,
        "gradient of lse dropped",
        "passes/bwd_passes.cuh",
        "bwd_preprocess_kernel does not subtract dlse from delta",
    ),
    Mutant(
        2601,
        "cu_seqlens not clamped",
        "common/seqlen.cuh",
        "packed_span() returns cu_seqlens[b] and cu_seqlens[b + 1] - cu_seqlens[b] as they are",
    ),
)

# Of the catalogue's 24: M8 needs an asynchronous proxy (sm90); M12, M13, M15, M17, M19 to M22 and M24 are
# bugs in split-KV, paging, semaphores, dropout, softcap, sinks, fp8, launch caches and bias, which do not
# exist here.


@dataclass
class Outcome:
    """What became of one mutant. status: killed, survived, not built, not run."""

    number: int
    status: str
    by: str
    seconds: float


def folder_of(mutant: Mutant) -> Path:
    return FOLDER / str(mutant.number)


def is_hooked(mutant: Mutant) -> bool:
    """Whether some source has the hook; a mutant without one would be an unchanged build."""
    hook = re.compile(rf"FLASH_EXT_MUTANT\s*==\s*{mutant.number}\b")
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h")]
    return any(hook.search(path.read_text(encoding="utf-8")) for path in sources)


def build(mutant: Mutant) -> str:
    """Builds a mutant into its folder; returns the end of the log if that failed, else ""."""
    folder = folder_of(mutant)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "FLASH_EXT_MUTANT": str(mutant.number)}
    environment.setdefault("FLASH_EXT_ARCHS", _arch_of_this_gpu())
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stdout + done.stderr)[-2000:]
    for name in ("flash_ext", "tests"):
        for source in (ROOT / name).glob("*"):
            if source.suffix in (".py", ".json", ".typed"):
                (folder / name).mkdir(exist_ok=True)
                shutil.copy(source, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return ""


def _arch_of_this_gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "8.0"
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}" + ("a" if major == 9 else "")


def run(mutant: Mutant, seed: int) -> Outcome:
    """Runs the tests against a built mutant until the first failure."""
    folder, started = folder_of(mutant), time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--seed",
        str(seed),
        *(f"tests/test_gauntlet_{name}.py" for name in TEST_FILES),
        "tests/test_fuzz.py",
    ]
    check = "from flash_ext.ops import _C; print(_C.build_info['variant'])"
    variant = subprocess.run(
        [sys.executable, "-c", check], cwd=folder, capture_output=True, text=True, check=False
    )
    if variant.stdout.strip() != f"mutant{mutant.number}":
        return Outcome(
            mutant.number, "not run", f"the build is {variant.stdout.strip()!r} {variant.stderr[-300:]}", 0
        )
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(mutant.number, "killed", f"no end within {RUN_SECONDS} s", RUN_SECONDS)
    seconds = time.monotonic() - started
    if done.returncode == 0:
        return Outcome(mutant.number, "survived", "", seconds)
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.M)
    lost = re.search(r"CUDA context lost", done.stdout)
    by = failed.group(1) if failed else "lost CUDA context" if lost else (done.stdout + done.stderr)[-300:]
    return Outcome(mutant.number, "killed" if failed or lost else "not run", by, seconds)


def record(outcomes: list[Outcome]) -> dict[int, Outcome]:
    """Adds outcomes to the matrix file and returns all of it."""
    path = FOLDER / "matrix.json"
    known = {}
    if path.exists():
        known = {item["number"]: Outcome(**item) for item in json.loads(path.read_text(encoding="utf-8"))}
    known |= {outcome.number: outcome for outcome in outcomes}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(o) for _, o in sorted(known.items())], indent=1), encoding="utf-8")
    return known


def matrix(known: dict[int, Outcome]) -> str:
    """The kill matrix as a markdown table."""
    lines = ["| n | mutant | planted bug | outcome | by | s |", "|---|---|---|---|---|---|"]
    for mutant in MUTANTS:
        o = known.get(mutant.number, Outcome(mutant.number, "not run", "", 0))
        by = o.by.removeprefix("tests/test_gauntlet_").replace("|", "/").splitlines()
        lines.append(
            f"| {mutant.number} | {mutant.name} | {mutant.bug} | {o.status} | "
            f"{by[0] if by else ''} | {o.seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and whether their hook exists")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants to take")
    parser.add_argument("--jobs", type=int, default=2, help="builds at a time")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--run-only", action="store_true", help="take what was built before")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or m.number in options.only]
    if options.list:
        for m in chosen:
            print(f"{m.number:5d}  {'' if is_hooked(m) else '(no hook) '}{m.name}\n       {m.place}: {m.bug}")
        return 0

    import torch

    outcomes = []
    ready = [m for m in chosen if is_hooked(m)]
    outcomes += [Outcome(m.number, "not built", "no hook in csrc/", 0) for m in chosen if m not in ready]
    if not options.run_only:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for mutant, problem in zip(ready, pool.map(build, ready)):
                print(f"{mutant.number}: {problem or 'built'}", flush=True)
                if problem:
                    outcomes.append(Outcome(mutant.number, "not built", problem[-200:], 0))
    if not options.build_only:
        failed = {o.number for o in outcomes}
        for mutant in ready:
            if mutant.number in failed:
                continue
            if torch.cuda.device_count() < mutant.needs_gpus:
                outcomes.append(Outcome(mutant.number, "not run", f"needs {mutant.needs_gpus} GPUs", 0))
                continue
            outcomes.append(run(mutant, options.seed))
            print(f"{mutant.number}: {outcomes[-1].status} by {outcomes[-1].by}", flush=True)
    known = record(outcomes)
    print(matrix(known))
    return int(any(o.status == "survived" for o in known.values()))


if __name__ == "__main__":
    sys.exit(main())
