"""``python -m bench.attention``: times flash_ext beside its peers and writes JSON, CSV, a table and plots.

Rows are cases in one direction. Within a row, everything runs in interleaved rounds on the same data, so that two
columns of a row may be compared; two rows, or two runs, may not be to better than the clock's mood.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import machine, timing
from bench.peers import CPU_PEERS, GPU_PEERS, Entrant, Inputs, make_ours, make_peers
from bench.record import Entry, Results, Row, bars_against_every_peer
from bench.report import describe, write_all, write_json
from bench.shapes import DIRECTIONS, SETS, Case, flops, output_bytes, traffic_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class DeviceLost(RuntimeError):
    """The device no longer answers, so no later row can be timed."""


def time_row(
    case: Case, direction: str, entrants: Iterable[Entrant], inputs: Inputs, timer: timing.Timer, rounds: int,
    budget_s: float, ceilings: dict[str, float]
) -> Row:
    """Times one case in one direction; whatever an entrant throws becomes the text of its entry.

    Args:
        ceilings: ``matmul_tflops`` and ``copy_gbps`` of this run, for the shares.

    Raises:
        DeviceLost: a failure left the device unusable.
    """
    itemsize = inputs.q.element_size()
    row = Row(case, direction, _dtype_name(inputs.dtype), flops(case, direction),
              traffic_bytes(case, direction, itemsize))
    calls: dict[str, timing.Call] = {}
    for entrant in entrants:
        if direction not in entrant.directions:
            continue
        entry = Entry(entrant.name, ours=entrant.ours)
        row.entries.append(entry)
        reason = entrant.why_not(case, direction)
        if reason:
            entry.status, entry.text = "refused", reason
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call = entrant.prepare(inputs, direction)
                call()
                timer.synchronize()
                entry.peak_bytes = timer.peak_bytes(call)
            except Exception as error:  # noqa: BLE001 - a peer's failure is a result
                _record_failure(entry, error, timer, caught)
                continue
        if entry.peak_bytes is not None:
            entry.extra_bytes = entry.peak_bytes - output_bytes(case, direction, itemsize)
        calls[entry.name] = call
    samples, failures = timing.measure(calls, timer, rounds, budget_s)
    for name, error in failures.items():
        _record_failure(row.entry(name), error, timer)
    for name, taken in samples.items():
        _fill(row.entry(name), taken, row, ceilings)
    return row


def _record_failure(entry: Entry, error: Exception, timer: timing.Timer, caught: Iterable = ()) -> None:
    """Keeps the error and the warnings that explain it, and makes sure the next entrant finds a working device."""
    reasons = list(dict.fromkeys(str(warning.message).strip() for warning in caught))
    entry.status = "error"
    entry.text = "; ".join([f"{type(error).__name__}: {error}", *reasons[:4]])[:2000]
    entry.peak_bytes = entry.extra_bytes = None
    timer.release()
    try:
        timer.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"after {entry.name}: {entry.text}") from lost


def _fill(entry: Entry, samples: timing.Samples, row: Row, ceilings: dict[str, float]) -> None:
    entry.q1_ms, entry.median_ms, entry.q3_ms = samples.quartiles()
    entry.round_medians_ms = samples.round_medians()
    entry.launches = len(samples.all)
    entry.call_us = statistics.median(samples.call_us) if samples.call_us else None
    entry.tflops = row.flops / entry.median_ms * 1e-9
    entry.gbps = row.traffic_bytes / entry.median_ms * 1e-6
    entry.matmul_pct = 100.0 * entry.tflops / ceilings["matmul_tflops"]
    entry.copy_pct = 100.0 * entry.gbps / ceilings["copy_gbps"]


def run(
    results: Results, cases: list[Case], directions: list[str], entrants: list[Entrant], timer: timing.Timer,
    device: torch.device, dtype: torch.dtype, *, rounds: int, budget_s: float, seed: int, time_limit_s: float,
    clocks: machine.ClockLog, on_row: Callable[[Row], None]
) -> None:
    """Times every case in every direction into ``results.rows``, and calls ``on_row`` after each one.

    Never raises because of an entrant. What cut a run short is kept as ``results.metadata["stopped"]``.
    """
    deadline = time.monotonic() + time_limit_s
    try:
        for case in cases:
            inputs = Inputs(case, dtype, device, seed)
            for direction in directions:
                started = time.monotonic()
                if started > deadline:
                    results.metadata["stopped"] = f"time limit of {time_limit_s:.0f} s"
                    return
                row = time_row(case, direction, entrants, inputs, timer, rounds, budget_s, results.ceilings)
                row.clocks = clocks.between(started, time.monotonic())
                results.rows.append(row)
                on_row(row)
    except KeyboardInterrupt:
        results.metadata["stopped"] = "interrupted"
    except (DeviceLost, torch.OutOfMemoryError) as error:
        results.metadata["stopped"] = str(error)


def host_cost_rows() -> list[dict]:
    """What one call costs the host, from ``bench.host_cost`` where it is there and runs."""
    if importlib.util.find_spec("bench.host_cost") is None:
        return []
    try:
        from bench import host_cost

        return host_cost.measure()
    except Exception as error:  # noqa: BLE001 - an extra must not cost the rows already timed
        return [{"call": "not measured", "error": f"{type(error).__name__}: {error}"}]


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def choose_cases(sets: list[str], pattern: str) -> list[Case]:
    """Cases of the named sets whose name matches a shell pattern.

    Raises:
        ValueError: a set has no such name, or nothing matches.
    """
    unknown = [name for name in sets if name not in SETS]
    if unknown:
        raise ValueError(f"no set is called {unknown[0]!r}; known: {', '.join(SETS)}")
    cases = [case for name in sets for case in SETS[name] if fnmatch.fnmatch(case.name, pattern)]
    if not cases:
        raise ValueError(f"no case of {', '.join(sets)} matches {pattern!r}")
    return cases


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line, with the defaults that depend on the device filled in."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="headline", help=f"comma list of {', '.join(SETS)}")
    parser.add_argument("--cases", default="*", help="shell pattern on case names within the sets")
    parser.add_argument("--list", action="store_true", help="print the cases and leave")
    parser.add_argument("--dirs", default="fwd,bwd", help=f"comma list of {', '.join(DIRECTIONS)}")
    parser.add_argument("--paths", default=None, help="comma list of our paths; default sm80 (GPU), cpu (CPU)")
    parser.add_argument("--peers", default=None,
                        help=f"comma list, 'none', or 'all'; default all that are found of {','.join(GPU_PEERS)} (GPU), "
                             f"{','.join(CPU_PEERS)} (CPU)")
    parser.add_argument("--fa3-lib", default="", help="library that registers torch.ops.flash_attn_3")
    parser.add_argument("--cudart12", default="", help="libcudart.so.12 to load before it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default bf16 (GPU), fp32 (CPU)")
    parser.add_argument("--rounds", type=int, default=6, help="interleaved rounds per row")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds of launches per row, all columns together")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="start no row after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    if options.paths is None:
        options.paths = "sm80" if on_gpu else "cpu"
    if options.peers in (None, "all"):
        options.peers = ",".join(GPU_PEERS if on_gpu else CPU_PEERS)
    options.peers = "" if options.peers == "none" else options.peers
    if options.dtype is None:
        options.dtype = "bf16" if on_gpu else "fp32"
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    bad = [word for word in _words(options.dirs) if word not in DIRECTIONS]
    if bad:
        parser.error(f"no direction is called {bad[0]!r}; known: {', '.join(DIRECTIONS)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0 once the files are written, whatever the peers did."""
    options = parse(argv)
    console = Console(soft_wrap=True)
    try:
        cases = choose_cases(_words(options.set), options.cases)
        if options.list:
            for case in cases:
                console.print(case.name, highlight=False)
            return 0
        peers, absent = make_peers(_words(options.peers), options.fa3_lib, options.cudart12)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name, reason in absent.items():
        console.print(f"peer {name} is not here: {reason}", highlight=False, markup=False)
    entrants = make_ours(_words(options.paths)) + peers

    device = torch.device(options.device, torch.cuda.current_device()) if options.device == "cuda" \
        else torch.device("cpu")
    timer = timing.make_timer(device)
    metadata = machine.collect(device, options.commit) | {
        "sets": options.set, "cases": options.cases, "dtype": options.dtype, "rounds": options.rounds,
        "budget_s": options.budget, "seed": options.seed, "cache": "L2 overwritten before every launch"
        if device.type == "cuda" else "warm", "absent_peers": absent,
    }
    dtype, directions = DTYPES[options.dtype], _words(options.dirs)
    ceilings = {"matmul_tflops": timing.matmul_tflops(timer, device, dtype),
                "copy_gbps": timing.copy_gbps(timer, device)}
    results = Results(metadata, ceilings)
    options.out.mkdir(parents=True, exist_ok=True)

    started = time.monotonic()
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    with contextlib.ExitStack() as stack:
        clocks = machine.ClockLog()
        if device.type == "cuda":
            stack.enter_context(clocks)
        progress = stack.enter_context(Progress(*columns, console=console))
        task = progress.add_task("starting", total=len(cases) * len(directions))

        def on_row(row: Row) -> None:
            write_json(results, options.out / "results.json")
            cells = "  ".join(f"{entry.name} {describe(entry)}" for entry in row.entries)
            progress.print(f"{row.direction:4} {row.case.name:28} {cells}", highlight=False, markup=False)
            progress.update(task, advance=1, description=f"{row.direction} {row.case.name}")

        run(results, cases, directions, entrants, timer, device, dtype, rounds=options.rounds,
            budget_s=options.budget, seed=options.seed, time_limit_s=options.time_limit, clocks=clocks,
            on_row=on_row)
    results.metadata["seconds"] = round(time.monotonic() - started, 1)
    if "stopped" not in results.metadata:
        results.ceilings["matmul_tflops_after"] = timing.matmul_tflops(timer, device, dtype)
        results.host_cost = host_cost_rows()
    if device.type == "cuda":
        results.metadata |= {f"{name}_after": value for name, value in machine.gpu_state().items()
                             if name != "driver_version" and not name.endswith("limit")}
    for path in write_all(results, options.out):
        console.print(str(path), highlight=False)
    for summary in bars_against_every_peer(results):
        console.print(str(summary), highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
