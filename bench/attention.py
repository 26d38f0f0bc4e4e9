"""``python -m bench.attention``: times flash_ext beside its peers and writes JSON, CSV, a table and plots.

Rows are cases in one direction. Within a row, everything runs in interleaved rounds on the same data, so that
two columns of a row may be compared; two runs may differ by what power and heat do to the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench import host_cost, machine, timing
from bench.entrants import Entrant, make_ours
from bench.feature_report import checks, held_by_path
from bench.model_report import model_tables
from bench.peers import CPU_PEERS, GPU_PEERS, make_peers
from bench.peers_fp8 import FP8_PEERS
from bench.record import DIRECTION_FILES, Results, Row, bars_against_every_peer
from bench.report import describe, write_all, write_json
from bench.runner import DTYPES, Setup, planned, run
from bench.shapes import DIRECTIONS, FP8_SETS, SETS, Case

FP8_PATHS = ("auto", "fp8", "mixed", "fp8+quantise")


def host_cost_rows(device: str, number: int = 200, repeats: int = 30) -> list[dict]:
    """What one call costs the host in microseconds, by ``bench.host_cost``."""
    try:
        times = host_cost.measure(device, number, repeats)
    except Exception as error:  # noqa: BLE001 - an extra must not cost the rows already timed
        return [{"call": "not measured", "error": f"{type(error).__name__}: {error}"}]
    return [{"call": name, "us": round(value, 2)} for name, value in times.items()]


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def serving_paths() -> list[str]:
    """Our paths that run plain attention on the current GPU, the one that a call takes by itself first."""
    try:
        from flash_ext import _C

        heads = {"num_heads": 16, "num_heads_k": 16, "head_dim": 128, "head_dim_v": 128}
        device = torch.cuda.current_device()
        reasons = _C.plan("fwd", seqlen_q=4096, seqlen_k=4096, **heads, device=device)["reasons"]
    except (ImportError, RuntimeError):
        return ["sm80"]  # its rows then say what is wrong
    return [path for path, reason in reasons.items() if not reason] or ["sm80"]


def choose_cases(sets: list[str], patterns: str) -> list[Case]:
    """Cases of the named sets whose name matches one of a comma list of shell patterns.

    Raises:
        ValueError: a set has no such name, or nothing matches.
    """
    unknown = [name for name in sets if name not in SETS]
    if unknown:
        raise ValueError(f"no set is called {unknown[0]!r}; known: {', '.join(SETS)}")
    words = _words(patterns)
    cases = [c for name in sets for c in SETS[name] if any(fnmatch.fnmatch(c.name, word) for word in words)]
    if not cases:
        raise ValueError(f"no case of {', '.join(sets)} matches {patterns!r}")
    return cases


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line, with the defaults that depend on the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", default="headline", help=f"comma list of {', '.join(SETS)}")
    parser.add_argument("--cases", default="*", help="comma list of shell patterns on names of cases")
    parser.add_argument("--list", action="store_true", help="print the cases and leave")
    parser.add_argument("--dirs", default="fwd,bwd", help=f"comma list of {', '.join(DIRECTIONS)}")
    parser.add_argument(
        "--paths",
        default=None,
        help="comma list of our paths, auto for the one that each call takes by itself, sm90-fp16 for one in "
        "that type, fp8, fp8-hadamard, mixed and fp8+quantise for attention in fp8; default all that serve, "
        f"or cpu, and {','.join(FP8_PATHS)} with --set fp8",
    )
    parser.add_argument(
        "--peers",
        default=None,
        help=f"comma list, 'none', or 'all'; default all that are found of {','.join(GPU_PEERS)} (GPU), "
        f"{','.join(CPU_PEERS)} (CPU), {','.join(FP8_PEERS)} (GPU, --set fp8)",
    )
    parser.add_argument(
        "--need-peers", action="store_true", help="measure nothing where one of --peers is not here"
    )
    parser.add_argument("--fa3-lib", default="", help="library that registers torch.ops.flash_attn_3")
    parser.add_argument("--cudart12", default="", help="libcudart.so.12 to load before it")
    parser.add_argument(
        "--fa3-fp8-lib", default="", help="library of vLLM that registers torch.ops._vllm_fa3_C"
    )
    machine.add_device_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default bf16 (GPU), fp32 (CPU)")
    parser.add_argument("--rounds", type=int, default=6, help="interleaved rounds per row")
    parser.add_argument(
        "--budget", type=float, default=1.5, help="seconds of launches per row, all columns together"
    )
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="start no row after so many seconds"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows of the results in --out and time the others"
    )
    options = parser.parse_args(argv)
    if not options.list:
        options.device = machine.device_asked_for(options, parser, "--set smoke")
    on_gpu = options.device == "cuda"
    in_fp8 = all(name in FP8_SETS for name in _words(options.set))
    if options.paths is None and in_fp8:
        options.paths = ",".join(FP8_PATHS)
    elif options.paths is None:
        options.paths = ",".join(serving_paths()) if on_gpu else "cpu"
    if options.peers in (None, "all"):
        known = [*(GPU_PEERS if on_gpu else CPU_PEERS)]
        if in_fp8:
            known = [*(FP8_PEERS if on_gpu else ()), *(known if options.peers == "all" else ())]
        options.peers = ",".join(known)
    options.peers = "" if options.peers == "none" else options.peers
    if options.dtype is None:
        options.dtype = "bf16" if on_gpu or in_fp8 else "fp32"
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    bad = [word for word in _words(options.dirs) if word not in DIRECTIONS]
    if bad:
        parser.error(f"no direction is called {bad[0]!r}; known: {', '.join(DIRECTIONS)}")
    return options


def prepare(options: argparse.Namespace, peers: list[Entrant]) -> Setup:
    """Chooses the device, and measures its ceilings."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    timer, dtype = timing.make_timer(device), DTYPES[options.dtype]
    return Setup(
        entrants=make_ours(_words(options.paths)) + peers,
        timer=timer,
        device=device,
        dtype=dtype,
        ceilings={
            "matmul_tflops": timing.matmul_tflops(timer, device, dtype),
            "copy_gbps": timing.copy_gbps(timer, device),
        },
        rounds=options.rounds,
        budget_s=options.budget,
        seed=options.seed,
        time_limit_s=options.time_limit,
    )


def run_with_progress(
    results: Results, cases: list[Case], directions: list[str], setup: Setup, *, console: Console, out: Path
) -> None:
    """:func:`bench.runner.run` with a progress bar, a line per row, and what is done so far on disk."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("starting", total=len(planned(results, cases, directions)))
        said = set()

        def on_row(row: Row) -> None:
            write_json(results, out / "results.json")
            cells = "  ".join(f"{entry.name} {describe(entry)}" for entry in row.entries)
            progress.print(f"{row.direction:4} {row.case.name:28} {cells}", highlight=False, markup=False)
            for entry in row.entries:
                if entry.text and (entry.name, entry.text) not in said:
                    said.add((entry.name, entry.text))
                    progress.print(f"     {entry.name}: {entry.text[:300]}", highlight=False, markup=False)
            progress.update(task, advance=1, description=f"{row.direction} {row.case.name}")

        on_gpu = setup.device.type == "cuda"
        with setup.clocks if on_gpu else contextlib.nullcontext():
            run(results, cases, directions, setup, on_row)


# What two runs must share for their rows to stand in one file.
SAME_RUN = ("device", "commit", "dirty", "build_sources", "torch", "paths", "peers", "dtype", "rounds",
            "budget_s", "seed")  # fmt: skip


def rows_of_before(path: Path, metadata: dict) -> list[Row]:
    """The rows of an earlier run, for this one to go on from; none where there is no such file.

    Raises:
        ValueError: it ran something else.
    """
    if not path.exists():
        return []
    before = Results.from_json(path.read_text())
    for name in SAME_RUN:
        if before.metadata.get(name) != metadata.get(name):
            raise ValueError(
                f"{path} has {name} {before.metadata.get(name)!r} and this run {metadata.get(name)!r}; "
                "leave out --resume, or name another --out"
            )
    return before.rows


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0 once the files are written, whatever the peers did.

    1: nothing was measured, since a peer is missing that had to be there.
    """
    options = parse(argv)
    console = Console(soft_wrap=True)
    try:
        cases = choose_cases(_words(options.set), options.cases)
        if options.list:
            print("\n".join(case.name for case in cases))
            return 0
        peers, absent = make_peers(
            _words(options.peers), options.fa3_lib, options.cudart12, options.fa3_fp8_lib
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name, reason in absent.items():
        console.print(f"peer {name} is not here: {reason}", highlight=False, markup=False)
    if absent and options.need_peers:
        return 1
    started = time.monotonic()
    setup = prepare(options, peers)
    metadata = machine.collect(setup.device, options.commit) | {
        "sets": options.set,
        "cases": options.cases,
        "paths": options.paths,
        "peers": options.peers,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "budget_s": options.budget,
        "seed": options.seed,
        "cache": "L2 overwritten before every launch" if setup.device.type == "cuda" else "warm",
        "absent_peers": absent,
    }
    results = Results(metadata, setup.ceilings)
    if options.resume:
        try:
            results.rows = rows_of_before(options.out / "results.json", metadata)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    options.out.mkdir(parents=True, exist_ok=True)
    run_with_progress(results, cases, _words(options.dirs), setup, console=console, out=options.out)
    if "stopped" in metadata:
        console.print(f"stopped early: {metadata['stopped']}", highlight=False, markup=False)
    else:
        setup.ceilings["matmul_tflops_after"] = timing.matmul_tflops(setup.timer, setup.device, setup.dtype)
        results.host_cost = host_cost_rows(setup.device.type)
    if setup.device.type == "cuda":
        metadata |= machine.gpu_state(machine.CHANGING_STATE, "_after")
    metadata["seconds"] = round(time.monotonic() - started, 1)
    for path in write_all(results, options.out):
        console.print(str(path), highlight=False)
    console.print("\n".join(model_tables(results, DIRECTION_FILES)), highlight=False, markup=False)
    for summary in bars_against_every_peer(results):
        console.print(str(summary), highlight=False, markup=False)
    demands = checks(results)
    if demands:
        console.print(f"features, {held_by_path(demands)}; the rest:", highlight=False)
        for check in demands:
            if not check.holds:
                console.print(f"  {check}", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
