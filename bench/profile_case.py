"""Runs one named case for a profiler, and condenses what ``ncu`` measured.

``bench/profile.sh`` calls this twice: ``run`` under ncu, where only the launch between cudaProfilerStart and
cudaProfilerStop is collected, and ``metrics`` on the raw page of the report. ``bench/profiles.sh`` makes one
``table`` of many such profiles.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

# What to look at first, in this order. Chips name some of these differently, so they are patterns: whatever
# matches is kept.
KEY_METRICS = (
    r"gpu__time_duration\.sum",
    r"(smsp|sm)__cycles_elapsed\.avg\.per_second",
    r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
    r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    r"sm__(inst_executed_)?pipe_(alu|fma|fmaheavy|fmalite|xu|lsu)\w*\.avg\.pct_of_peak_sustained_active",
    r"(sm__inst_issued|smsp__issue_active)\.avg\.pct_of_peak_sustained_active",
    r"smsp__issue_active\.avg\.per_cycle_active",
    r"(gpu__)?dram__?throughput\.avg\.pct_of_peak_sustained_elapsed",
    r"dram__bytes_(read|write)\.sum",
    r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    r"lts__t_sector_hit_rate\.pct",
    r"l1tex__data_pipe_lsu_wavefronts(_mem_shared)?\.avg\.pct_of_peak_sustained_(active|elapsed)",
    r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared(_op_\w+)?\.sum",
    r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
    r"launch__(grid_size|block_size|registers_per_thread|shared_mem_per_block_dynamic|waves_per_multiprocessor)",
    r"launch__occupancy_limit_\w+",
    r"smsp__inst_executed_op_local\w*\.sum",
    r"smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio",
)

# Columns of a table: the largest of all metrics that match, in per cent.
SHARES = {
    "tensor cores": r"sm__pipe_tensor\w*cycles_active\.avg\.pct_of_peak_sustained_active",
    "issue": r"(sm__inst_issued|smsp__issue_active)\.avg\.pct_of_peak_sustained_active",
    "alu": r"sm__(inst_executed_)?pipe_alu\w*\.avg\.pct_of_peak_sustained_active",
    "fma": r"sm__(inst_executed_)?pipe_fma\w*\.avg\.pct_of_peak_sustained_active",
    "xu": r"sm__(inst_executed_)?pipe_xu\w*\.avg\.pct_of_peak_sustained_active",
    "shared memory": r"l1tex__data_pipe_lsu_wavefronts\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "L2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "memory": r"(gpu__)?dram__?throughput\.avg\.pct_of_peak_sustained_elapsed",
}
STALL = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def run_case(options: argparse.Namespace) -> None:
    """Warms a case up, then makes the one call that the profiler is to see.

    Raises:
        ValueError: no such case or entrant.
    """
    import torch

    from bench.entrants import make_ours
    from bench.inputs import Inputs
    from bench.peers import GPU_PEERS, make_peers
    from bench.runner import DTYPES
    from bench.shapes import find_case
    from bench.timing import CudaTimer

    case, name = find_case(options.case), options.entrant
    if name in GPU_PEERS:
        entrants, absent = make_peers([name], options.fa3_lib, options.cudart12)
        if absent:
            raise ValueError(f"{name}: {absent[name]}")
    else:
        entrants = make_ours([name.split("-")[0]])
    entrant = next(e for e in entrants if e.name == name)
    device = torch.device("cuda", torch.cuda.current_device())
    call = entrant.prepare(Inputs(case, DTYPES[options.dtype], device, options.seed), options.dir)
    timer = CudaTimer(device)
    timer.launch(call, 3)
    timer.flush_buffer.zero_()
    timer.synchronize()
    torch.cuda.profiler.start()
    call()
    timer.synchronize()
    torch.cuda.profiler.stop()


def key_metrics(raw: list[list[str]]) -> list[list[str]]:
    """Turns ncu's raw page into one line per key metric and one column per kernel.

    Args:
        raw: rows of ``ncu --page raw --csv``: names, units, then one row per kernel.

    Returns:
        Rows of metric, unit, and one value per kernel; the first row holds the kernel names.

    Raises:
        ValueError: there is no header, or no kernel below it.
    """
    start = next((i for i, row in enumerate(raw) if "Kernel Name" in row), None)
    if start is None or len(raw) < start + 3:
        raise ValueError(
            "no kernel was profiled: wrong NVTX range, or a build without NVTX headers (--nvtx none)"
        )
    names, units, *kernels = raw[start:]
    table = [["metric", "unit", *(row[names.index("Kernel Name")] for row in kernels)]]
    for pattern in KEY_METRICS:
        for column, name in enumerate(names):
            if re.fullmatch(pattern, name):
                table.append([name, units[column], *(row[column] for row in kernels)])
    return table


def condense(raw_path: Path, key_path: Path) -> None:
    """Writes the key metrics of a raw CSV page as CSV, and prints them."""
    with raw_path.open(newline="") as file:
        table = key_metrics([row for row in csv.reader(file) if row and not row[0].startswith("==")])
    with key_path.open("w", newline="") as file:
        csv.writer(file).writerows(table)
    for metric, unit, *values in table:
        print(f"{metric:78} {unit:16} {'  '.join(value[:40] for value in values)}")


def profile_lines(key_path: Path) -> list[str]:
    """A line of the table for each kernel of a profile that takes a tenth of its time.

    Args:
        key_path: what ``condense`` left, its name the case, the direction and the entrant.
    """
    with key_path.open(newline="") as file:
        (_, _, *names), *body = csv.reader(file)
    metrics = {metric: (unit, [_number(x) for x in row]) for metric, unit, *row in body}
    unit, times = metrics["gpu__time_duration.sum"]
    lines = []
    for at, name in enumerate(names):
        if times[at] < 0.1 * sum(times):
            continue
        short = re.sub(r"^void |\(\w+\)(?=\d)|\w+::|\([^()]*\)$", "", name)
        cells = [key_path.stem, f"`{short}`", f"{times[at] * MICROSECONDS[unit]:.0f}"]
        for pattern in SHARES.values():
            found = [values[at] for metric, (_, values) in metrics.items() if re.fullmatch(pattern, metric)]
            cells.append(f"{max(found):.0f}" if found else "")
        lines.append(f"| {' | '.join([*cells, ', '.join(largest_stalls(metrics, at))])} |")
    return lines


def _number(text: str) -> float:
    """As ncu prints it, with commas; 0 for what it could not measure."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def largest_stalls(metrics: dict[str, tuple[str, list[float]]], at: int) -> list[str]:
    """The four reasons for which warps wait most, in warps an issued instruction."""
    stalls = {found[1]: x[at] for metric, (_, x) in metrics.items() if (found := re.fullmatch(STALL, metric))}
    stalls.pop("selected", None)
    order = sorted(stalls, key=lambda reason: -stalls[reason])
    return [f"{reason.replace('_', ' ')} {stalls[reason]:.2f}" for reason in order[:4]]


def write_table(folder: Path) -> None:
    """Prints all profiles of a folder as one table, which becomes its profiles.md."""
    head = ["profile", "kernel", "us", *(f"{name}, %" for name in SHARES), "stalls, warps an instruction"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for path in sorted(folder.glob("*.csv")):
        if not path.name.endswith(".raw.csv"):
            lines += profile_lines(path)
    text = "\n".join(lines)
    (folder / "profiles.md").write_text(text + "\n")
    print(text)


def main(argv: list[str] | None = None) -> int:
    """Command line of both steps."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.profile_case",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parser.add_subparsers(dest="step", required=True)
    run = steps.add_parser("run", help="one call of one case, between profiler start and stop")
    run.add_argument("case")
    run.add_argument("--dir", choices=("fwd", "bwd"), default="fwd")
    run.add_argument("--entrant", default="sm80", help="a path of ours, or a peer")
    run.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--fa3-lib", default="")
    run.add_argument("--cudart12", default="")
    metrics = steps.add_parser("metrics", help="key metrics out of ncu's raw CSV page")
    metrics.add_argument("raw", type=Path)
    metrics.add_argument("key", type=Path)
    table = steps.add_parser("table", help="one table of all profiles in a folder")
    table.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    try:
        if options.step == "metrics":
            condense(options.raw, options.key)
        elif options.step == "table":
            write_table(options.folder)
        else:
            run_case(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
