"""What ncu counts of every rung: bytes of memory and of the L2 cache, shared memory, and how full the GPU is.

One process runs all rungs under ncu; a softmax of a single row between two of them says where one ends.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from . import native
from .measure import Row, random_qkv
from .rungs import RUNGS, rungs_for

METRICS = {
    "ms": ("gpu__time_duration.sum", 1e-6),
    "dram_read_bytes": ("dram__bytes_read.sum", 1.0),
    "dram_written_bytes": ("dram__bytes_write.sum", 1.0),
    # Between the multiprocessors and the L2 cache: what a GPU without that cache would ask of memory.
    "l2_read_bytes": ("lts__t_sectors_srcunit_tex_op_read.sum", 32.0),
    "l2_written_bytes": ("lts__t_sectors_srcunit_tex_op_write.sum", 32.0),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 1.0),
    "warps_active_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    # Of all multiprocessors over the whole launch, those with nothing to do included.
    "busy_pct": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "ctas": ("launch__grid_size", 1.0),
}
SUMMED = (
    "ms",
    "dram_read_bytes",
    "dram_written_bytes",
    "l2_read_bytes",
    "l2_written_bytes",
    "shared_wavefronts",
)
SEPARATOR = "softmax_kernel"
# (batch, num_heads, seqlen, head_dim)
SHAPES = ((4, 32, 4096, 64), (4, 16, 4096, 128), (1, 1, 4096, 64), (1, 8, 4096, 64))


def run_all() -> None:
    """Under ncu: every rung once at every shape, warmed up before, a separator in front of each."""
    device = torch.device("cuda")
    row = torch.zeros(1, 4, device=device)
    for shape in SHAPES:
        q, k, v = random_qkv(shape, device)
        for rung in rungs_for(device):
            call = rung.prepare(q, k, v)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            native.softmax(row, native.Passes.THREE)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def profile_rows() -> list[Row]:
    """A row for each rung and shape; none, with words on standard error, where ncu is missing or fails."""
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        print("no ncu: nothing is profiled", file=sys.stderr)
        return []
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
               "--print-units", "base", "--metrics", ",".join(name for name, _ in METRICS.values()),
               sys.executable, "-m", "examples.ladder", "--under-ncu"]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=native.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=dict(os.environ),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        print(f"ncu failed:\n{(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
        return []
    names = [rung.name for rung in rungs_for(torch.device("cuda"))]
    return rows_of(list(csv.reader(lines)), [(shape, name) for shape in SHAPES for name in names])


def rows_of(raw: Sequence[Sequence[str]], launches: Sequence[tuple[tuple[int, ...], str]]) -> list[Row]:
    """One row for each launch of a rung, which may be several kernels.

    Args:
        raw: of ncu's CSV: names, units, then one line per kernel.
        launches: shape and name of the rung behind each separator.

    Raises:
        ValueError: another number of separators.
    """
    head, _, *kernels = raw
    name_at = head.index("Kernel Name")
    groups: list[list[Sequence[str]]] = []
    for kernel in kernels:
        if SEPARATOR in kernel[name_at]:
            groups.append([])
        else:
            groups[-1].append(kernel)
    if len(groups) != len(launches):
        raise ValueError(f"{len(launches)} rungs were run, ncu saw {len(groups)}")
    rows: list[Row] = []
    for (shape, name), group in zip(launches, groups, strict=True):
        row: Row = {"section": "profile", "name": name, "shape": list(shape), "kernels": len(group)}
        algorithm = RUNGS[name].algorithm if name in RUNGS else ""
        if algorithm:
            row["algorithm"] = algorithm
        for key, (metric, unit) in METRICS.items():
            if metric not in head:
                continue
            values = [float(kernel[head.index(metric)].replace(",", "") or "nan") * unit for kernel in group]
            # A percentage, or a number of CTAs, is that of the longest kernel.
            longest = max(
                range(len(group)),
                key=lambda i: float(group[i][head.index(METRICS["ms"][0])].replace(",", "")),
            )
            row[key] = sum(values) if key in SUMMED else values[longest]
        rows.append(row)
    return rows
