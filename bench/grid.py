"""Times every row of the plan's tables over a grid of shapes: the evidence that the tables follow.

    python -m bench.grid --out grid.csv --minutes 4    # goes on where the file ends
    python -m bench.grid --report grid.csv             # what the tables' choices cost, what each row gains

Each shape runs with every row that can serve it, in interleaved rounds. The file has a line for each shape
and row; its time is the median of all launches, in microseconds, with the L2 cache overwritten before each.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

import flash_ext
from bench import machine, timing
from flash_ext._ops.library import _C

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SEQLENS = (64, 128, 197, 256, 320, 384, 512, 577, 640, 768, 1024, 1280, 1500, 2048, 3072, 4096, 8192)
HEADS = ((12, 12), (16, 16), (32, 8))
TOKENS = (4096, 32768)
ROUNDS = 3
TOLERANCE = 1.03  # times the fastest row


class Shape(NamedTuple):
    """A call without modifiers. Lengths in tokens; causal is aligned at the bottom right."""

    direction: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        heads = str(self.num_heads)
        heads += f"/{self.num_heads_k}" if self.num_heads != self.num_heads_k else ""
        keys = f" K{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        mask = " causal" if self.causal else ""
        return f"{self.direction} D{self.head_dim} B{self.batch} S{self.seqlen_q}{keys} H{heads}{mask}"


class Line(NamedTuple):
    """What the file holds of a row at a shape; is_chosen: the tables' own choice."""

    shape: Shape
    row: str
    is_chosen: bool
    us: float


def shapes(head_dims: Iterable[int]) -> list[Shape]:
    """The grid, in an order that spreads any beginning of it over the whole."""
    found = [
        Shape(direction, max(1, tokens // seqlen), seqlen, seqlen, heads, heads_k, head_dim, causal)
        for direction, head_dim, seqlen, (heads, heads_k), tokens, causal in itertools.product(
            ("fwd", "bwd"), head_dims, SEQLENS, HEADS, TOKENS, (False, True)
        )
    ]
    return sorted(set(found), key=lambda shape: zlib.crc32(repr(shape).encode()))


def plan_of(shape: Shape, row: str | None, gpu: tuple[int, ...] | None = None) -> dict:
    """The plan of a call, by a row or by the tables' choice.

    Raises:
        ValueError: the row cannot serve it.
    """
    numbers = shape._asdict()
    direction, causal, head_dim = (numbers.pop(name) for name in ("direction", "causal", "head_dim"))
    return _C.plan(direction, **numbers, head_dim=head_dim, head_dim_v=head_dim,
                   window_right=0 if causal else -1, path=row and f"row={row}", gpu=gpu)  # fmt: skip


def rows_of(shape: Shape, gpu: tuple[int, ...] | None = None) -> tuple[list[str], str]:
    """The rows that can serve a shape, and the chosen one."""
    chosen = plan_of(shape, None, gpu)
    served = []
    for row in (row for path, row, _ in _C.plan_rows() if path == chosen["path"]):
        try:
            plan_of(shape, row, gpu)
        except ValueError:
            continue
        served.append(row)
    return served, chosen["row"]


def measure(shape: Shape, timer: timing.Timer, seconds: float) -> list[Line]:
    """All rows of a shape on the same random numbers."""
    rows, chosen = rows_of(shape)
    of_keys = (shape.seqlen_k, shape.num_heads_k)
    q, k, v = (torch.randn(shape.batch, *size, shape.head_dim, device="cuda", dtype=torch.bfloat16)
               for size in ((shape.seqlen_q, shape.num_heads), of_keys, of_keys))  # fmt: skip
    out, lse = flash_ext.forward(q, k, v, causal=shape.causal)
    dout = torch.randn_like(out)

    def call(row: str) -> timing.Call:
        if shape.direction == "fwd":
            return lambda: flash_ext.forward(q, k, v, causal=shape.causal, backend=f"row={row}")
        return lambda: flash_ext.backward(dout, q, k, v, out, lse, causal=shape.causal, backend=f"row={row}")

    samples, failures = timing.measure({row: call(row) for row in rows}, timer, ROUNDS, seconds)
    for row, error in failures.items():
        print(f"{row} fails at {shape}: {error}"[:200], file=sys.stderr)
    return [Line(shape, row, row == chosen, 1e3 * found.quartiles()[1]) for row, found in samples.items()]


# ---- the file ----------------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """What has been measured; nothing if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Line(Shape(row[0], *map(int, row[1:7]), row[7] == "True"), row[8], row[9] == "True", float(row[10]))
            for row in itertools.islice(csv.reader(file), 1, None)
        ]


def append(path: Path, lines: list[Line]) -> None:
    """Adds the lines of one shape, and the header to a new file."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow((*Shape._fields, "row", "is_chosen", "us"))
        writer.writerows((*line.shape, line.row, line.is_chosen, f"{line.us:.2f}") for line in lines)


# ---- the report --------------------------------------------------------------------------------------------


def mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def report(lines: list[Line], most: int = 40) -> str:
    """Where the tables' choice is not the fastest row, and what a row gains where it is chosen."""
    by_shape: dict[Shape, list[Line]] = defaultdict(list)
    for line in lines:
        by_shape[line.shape].append(line)
    losses, gains = [], defaultdict(list)
    for shape, found in by_shape.items():
        chosen = next((line for line in found if line.is_chosen), None)
        if chosen is None or len(found) < 2:
            continue
        best = min(found, key=lambda line: line.us)
        losses.append((chosen.us / best.us, shape, chosen, best))
        gains[chosen.row].append(min(line.us for line in found if line is not chosen) / chosen.us)
    losses.sort(key=lambda loss: loss[0], reverse=True)
    groups = defaultdict(list)
    for ratio, shape, *_ in losses:
        groups[f"{shape.direction} D{shape.head_dim}"].append(ratio)
    text = [f"{len(by_shape)} shapes", "time of the choice over that of the fastest row, geometric mean and worst:"]
    text += [f"  {name}: {mean(found):.3f}, {max(found):.3f}" for name, found in sorted(groups.items())]
    text.append("time of the next fastest row over that of the chosen one:")
    text += [f"  {row}: {mean(found):.3f} at {len(found)} shapes" for row, found in sorted(gains.items())]
    slow = [loss for loss in losses if loss[0] > TOLERANCE]
    text.append(f"{len(slow)} shapes above {TOLERANCE}, the worst:")
    text += [f"  {ratio:.3f} {shape}: {chosen.row} {chosen.us:.0f} us, {best.row} {best.us:.0f} us"
             for ratio, shape, chosen, best in slow[:most]]  # fmt: skip
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    machine.add_device_option(parser)
    parser.add_argument("--head-dims", default="64,128", help="of " + ",".join(map(str, HEAD_DIMS)))
    parser.add_argument("--minutes", type=float, default=4.0, help="stop after so long (default 4)")
    parser.add_argument("--seconds", type=float, default=0.01, help="a shape (default 0.01)")
    parser.add_argument("--out", type=Path, help="CSV that is gone on with")
    parser.add_argument("--report", type=Path, help="CSV to report on, without measuring")
    options = parser.parse_args()
    if options.report:
        print(report(read(options.report)))
        return 0
    if options.out is None:
        parser.error("--out or --report is needed")
    if machine.device_asked_for(options, parser, "--head-dims 64") != "cuda":
        parser.error("rows are those of a GPU")
    timer, end = timing.make_timer(torch.device("cuda")), time.monotonic() + 60 * options.minutes
    done = {line.shape for line in read(options.out)}
    head_dims = map(int, options.head_dims.split(","))
    wanted = [shape for shape in shapes(head_dims) if shape not in done]
    for at, shape in enumerate(wanted):
        if time.monotonic() > end:
            print(f"{len(wanted) - at} of {len(wanted)} shapes are left: run the same again")
            break
        append(options.out, measure(shape, timer, options.seconds))
    print(report(read(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
