"""Random pauses around every barrier must not change a bit.

A copy of the project is built with FLASH_EXT_DEBUG=1, whose kernels pause warps around barriers, those for
Hopper before every wait, as a seed says (csrc/common/debug_delay.cuh). Small cases of every plain kernel and
of every kind of kernel with modifiers run without pauses and then with those of 200 seeds: out, lse, dk, dv
and gradients of modifiers must keep their bits, and dq in the deterministic mode. For racecheck a debug
build orders a pair's P by a full barrier; the copy keeps what a release does.

    python -m tests.tools.race_delays                  builds, then runs; needs a GPU and the CUDA toolkit
    python -m tests.tools.race_delays --mutant 702     with a planted bug, which the pauses should show
    python -m tests.tools.race_delays --build-only     then --run-only: the two halves in separate commands
    python -m tests.tools.race_delays --seeds 20 --target sm80-99k

Exit status: 0 the same bits throughout (with --mutant: a difference was found), 1 otherwise, 2 not a debug
build or no build, 3 no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import flash_ext
from flash_ext._ops.library import _C
from tests.cases import Case, dense, few_query_cases, packed, small_cases
from tests.harness import TARGETS, Target, call_backward, call_forward, compute
from tests.inputs import make_inputs
from tests.pages import Cache, in_bytes, make_cache, packed_queries
from tests.sources import replace_once
from tests.tools import mutants
from tests.tools.planted import CONTROL, MUTANTS, Edit, Mutant
from tests.tools.sanitizer_cases import on_one_multiprocessor

SEED_VARIABLE = "FLASH_EXT_DEBUG_DELAY_SEED"
# In a debug build a pair's first warp waits where it only arrives in a release.
AS_IN_A_RELEASE = Edit(
    "ptx/sm80.cuh",
    "#if FLASH_EXT_DEBUG\n  // compute-sanitizer",
    "#if !FLASH_EXT_DEBUG\n  // compute-sanitizer",
)

Run = Callable[[], dict[str, Tensor]]


# ---- the build -------------------------------------------------------------------------------------------


def build(mutant: Mutant) -> Path:
    """A copy of the project in build/race_delays, built for this GPU; returns its folder.

    Raises:
        subprocess.CalledProcessError: it does not compile.
        ValueError: an edit has lost its place in the sources.
    """
    folder = folder_of(mutant)
    mutants.plant(mutant, folder)
    for file, text in with_edits(folder / "csrc", AS_IN_A_RELEASE).items():
        (folder / "csrc" / file).write_text(text, encoding="utf-8")
    environment = {**os.environ, "FLASH_EXT_DEBUG": "1"}
    environment.setdefault("FLASH_EXT_ARCHS", mutants.arch_of_this_gpu())
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder


def folder_of(mutant: Mutant) -> Path:
    return mutants.ROOT / "build" / "race_delays" / str(mutant.number)


def with_edits(csrc: Path, edit: Edit) -> dict[str, str]:
    """File to text after an edit that must have exactly one place."""
    text = (csrc / edit.file).read_text(encoding="utf-8")
    return {edit.file: replace_once(text, edit.find, edit.replace, edit.file)}


# ---- the runs --------------------------------------------------------------------------------------------


def modifier_cases() -> list[Case]:
    """Loops over a list of tiles, packed; and, dense, what Hopper has kernels of their own for: a bias that
    comes by TMA and its gradient, a cap, dropout alone and beside a bias; all of them also in two kernels,
    above head_dim 128 and in a fixed order."""
    found = []
    for head_dim in (64, 128, 192, 256):
        for deterministic in (False, True):
            options = {"causal": True, "deterministic": deterministic}
            case = packed(
                [3, 0, 130, 64], [70, 9, 129, 0], num_heads=4, num_heads_k=2, head_dim=head_dim, **options
            )
            kinds = ("mask_bhqk",), ("documents", "alibi"), ("distance40",)
            found += [case.replace(mods=mods) for mods in kinds]
            case = dense(3, 130, 136, 4, 2, head_dim, **options)
            kinds = ("bias_1hqk",), ("softcap30",), ("drop0.5",), ("bias_bhqk", "drop0.5")
            found += [case.replace(mods=mods) for mods in kinds]
    return found


def runs(target: Target) -> Iterator[tuple[str, Run]]:
    """What is compared, by name: results of one call and of its gradients, without those that may differ."""
    for case in small_cases() + few_query_cases():
        yield str(case), plain_run(case, target)
    for case in modifier_cases():
        yield str(case), modified_run(case, target)
    for case in pool_cases() if target.path == "sm90" else ():
        yield f"ring {case}", ring_run(case, target)
    for case in few_row_cases() if target.path == "sm90" else ():
        yield f"few rows {case}", few_rows_run(case, target)
    yield from cached_runs(target)


def few_row_cases() -> list[Case]:
    """dK and dV in one kernel, dQ in another, on one multiprocessor."""
    return [
        dense(2, 300, 430, 2, 2, 128, causal=causal, dtype=("bf16", "fp16")[causal], deterministic=True)
        for causal in (False, True)
    ]


def few_rows_run(case: Case, target: Target) -> Run:
    few = on_one_multiprocessor(target)
    plain = plain_run(case, few)

    def run() -> dict[str, Tensor]:
        with few.active():
            found = plain()
            assert _C.last_launch()["kernel"].endswith("_dkdv"), str(case)
        return found

    return run


def pool_cases() -> list[Case]:
    """Six rounds of heads or more for RING_SMS multiprocessors, of which four have accumulators."""
    return [
        dense(12, 130, 150, 4, 2, head_dim, causal=causal, dtype=("bf16", "fp16")[causal])
        for head_dim in (64, 96, 128)
        for causal in (False, True)
    ]


def cached_runs(target: Target) -> Iterator[tuple[str, Run]]:
    """Over pages of 16 and of 3 keys, of 8 bits, and of latents, in tiles of every width."""
    lengths = [1500, 0, 333]
    for head_dim, page_size in itertools.product((64, 128), (16, 3)):
        cache = make_cache(lengths, page_size, 2, head_dim, device=target.device, dtype=torch.bfloat16)
        narrow = {dtype: in_bytes(cache, dtype, "slots") for dtype in (torch.float8_e4m3fn, torch.int8)}
        for count in (2, 9, 30, 150):
            name = f"pages of {page_size}, {head_dim} {count}"
            yield name, cached_run(cache.k, cache.v, cache, 8, count, target)
            for dtype, (held, descales) in narrow.items():
                yield f"{name} {dtype}", cached_run(held.k, held.v, cache, 8, count, target, **descales)
    if target.path == "sm90":
        for heads, page_size in itertools.product((16, 128), (64, 3)):
            cache = make_cache(lengths, page_size, 1, 576, 576, target.device, torch.bfloat16)
            name = f"latents in pages of {page_size}, {heads}"
            yield name, cached_run(cache.k, cache.k[..., :512], cache, heads, 3, target)


def cached_run(
    k: Tensor, v: Tensor, cache: Cache, heads: int, count: int, target: Target, **descales: Tensor
) -> Run:
    q, bounds, _ = packed_queries([count] * 3, heads, k.shape[-1], str(target.device), torch.bfloat16)

    def run() -> dict[str, Tensor]:
        out, aux = flash_ext.attention_varlen(
            q, k, v, bounds, None, causal=True, seqused_k=cache.lengths, block_table=cache.table,
            return_aux=flash_ext.AuxRequest(lse=True), backend=target.choice, **descales,
        )  # fmt: skip
        return {"out": out[: 3 * count], "lse": aux.lse}

    return run


RING_SMS = 3


def with_pool(target: Target, ring: int) -> Target:
    return target.pretending(num_sms=RING_SMS).asking(dq_pool=ring)


def ring_run(case: Case, target: Target) -> Run:
    """dq, whose additions have no order, is compared with that of accumulators in no ring."""
    x = make_inputs(case, target.device)
    without, chosen = with_pool(target, 0), with_pool(target, 1)
    with without.active():
        out, lse = call_forward(x, without)
        expected = call_backward(x, out, lse, without)[0].float()

    def run() -> dict[str, Tensor]:
        with chosen.active():
            dq, dk, dv = call_backward(x, out, lse, chosen)
        wrong = ~((dq.float() - expected).abs() <= 1e-3 + 2.0**-7 * expected.abs())
        if os.environ[SEED_VARIABLE] == "0":
            assert not wrong.any(), f"{case}: dq differs without pauses"
        return {"dq": wrong, "dk": dk, "dv": dv}

    return run


def plain_run(case: Case, target: Target) -> Run:
    x = make_inputs(case, target.device)

    def run() -> dict[str, Tensor]:
        out, lse = call_forward(x, target)
        dq, dk, dv = call_backward(x, out, lse, target)
        found = {"out": out, "lse": lse, "dk": dk, "dv": dv}
        return found | ({"dq": dq} if case.deterministic else {})

    return run


def modified_run(case: Case, target: Target) -> Run:
    x = make_inputs(case, target.device)

    def run() -> dict[str, Tensor]:
        found = compute(x, target)
        return {name: t for name, t in found.items() if name != "dq" or case.deterministic}

    return run


def differences(run: Run, seeds: range) -> Iterator[str]:
    """Every seed whose pauses change a bit, and in what."""
    os.environ[SEED_VARIABLE] = "0"
    expected = run()
    try:
        for seed in seeds:
            os.environ[SEED_VARIABLE] = str(seed)
            found = run()
            wrong = [name for name, t in expected.items() if not torch.equal(t, found[name])]
            if wrong:
                yield f"seed {seed}: {', '.join(wrong)}"
    finally:
        os.environ[SEED_VARIABLE] = "0"


def compare(target: Target, seeds: int, most: int = 10) -> int:
    """Prints what differs, the first ``most`` cases of it; returns how many cases differ."""
    wrong = count = 0
    with target.active():
        for name, run in runs(target):
            count += 1
            first = next(differences(run, range(1, seeds + 1)), None)
            if first is not None:
                wrong += 1
                print(f"DIFFERS {name}, {first}", flush=True)
                if wrong == most:
                    break
    print(f"{target.name}: {wrong} of {count} cases differ under the pauses of {seeds} seeds", flush=True)
    return wrong


def run_here(targets: list[str], seeds: int) -> int:
    """Compares in this tree, whose build must be a debug one."""
    if _C.build_info["variant"] != "debug":
        print(f"this is a {_C.build_info['variant']} build, which pauses nowhere", file=sys.stderr)
        return 2
    for name in targets:
        if TARGETS[name].why_not():
            print(f"NOT CHECKED: target {name}: {TARGETS[name].why_not()}", file=sys.stderr)
            return 3
    return int(sum(compare(TARGETS[name], seeds) for name in targets) > 0)


def main(argv: list[str] | None = None) -> int:
    """Builds the copy and starts this program there with ``--here``."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.race_delays",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--target", choices=[n for n in TARGETS if n != "cpu"], help="default: all on a GPU")
    parser.add_argument("--mutant", type=int, choices=[m.number for m in MUTANTS], help="plant a bug first")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--run-only", action="store_true")
    parser.add_argument("--here", action="store_true", help="compare in this tree as it is built")
    options = parser.parse_args(argv)
    targets = [options.target] if options.target else [name for name in TARGETS if name != "cpu"]
    if options.here:
        return run_here(targets, options.seeds)
    mutant = next((m for m in MUTANTS if m.number == options.mutant), CONTROL)
    if not options.run_only:
        build(mutant)
    if options.build_only:
        return 0
    if not folder_of(mutant).is_dir():
        print(f"{folder_of(mutant)} is not there: build first", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "tests.tools.race_delays", "--here", "--seeds", str(options.seeds)]
    command += ["--target", options.target] if options.target else []
    code = subprocess.run(command, cwd=folder_of(mutant), check=False).returncode
    # A planted bug is to be found: bits that differ are then what was asked for.
    return {0: 1, 1: 0}.get(code, code) if options.mutant is not None else code


if __name__ == "__main__":
    sys.exit(main())
