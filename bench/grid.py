"""Times every row of the plan's tables over a grid of shapes: the evidence that the tables follow.

    python -m bench.grid --out grid.csv --minutes 4    # goes on where the file ends
    python -m bench.grid --kinds slopes,documents --paths sm90,sm80 --out grid.csv
    python -m bench.grid --short --head-dims 32,64,128 --out short.csv
    python -m bench.grid --report grid.csv             # what the present choices cost, what rows gain

Each shape runs with every row that can serve it, in interleaved rounds. The file has a line for each shape
and row; its time is the median of all launches, in microseconds, with the L2 cache overwritten before each.
With --short other kernels run before each launch too: of calls that are over in a few microseconds it decides
how long their code takes to come from memory.
"""

from __future__ import annotations

import argparse
import csv
import gzip
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
from torch import Tensor

import flash_ext
from bench import machine, timing
from flash_ext import masks
from flash_ext._ops.library import _C
from flash_ext._ops.plan import plan

KINDS = ("plain", "padding", "documents", "slopes", "softcap", "dropout", "bias")
# Of flash_ext._ops.plan, where that is not the kind itself.
WORDS = {"plain": "", "padding": "key_padding", "slopes": "alibi"}
GPU = "9.0/132"  # of the stored grid: an H200
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SEQLENS = (64, 128, 197, 256, 320, 384, 512, 577, 640, 768, 1024, 1280, 1500, 2048, 3072, 4096, 8192)
HEADS = ((12, 12), (16, 16), (32, 8))
TOKENS = (4096, 32768)
# Of the short calls: rows of square ones, queries and keys of others, and how many heads there are in all.
SHORT_SEQLENS = (16, 24, 32, 48, 64, 77, 96, 128, 192, 256, 512)
FEW_QUERIES, FEW_KEYS = (1, 4, 16), (32, 64, 128, 256, 512, 1024, 2048)
SHORT_HEADS = (8, 64, 512, 4096)
ROUNDS = 3
TOLERANCE = 1.03  # times the fastest row


class Shape(NamedTuple):
    """A call on a path, of one of KINDS. Lengths in tokens; causal is aligned at the bottom right."""

    path: str
    direction: str
    kind: str
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
        sizes = f"D{self.head_dim} B{self.batch} S{self.seqlen_q}{keys} H{heads}{mask}"
        return f"{self.path} {self.direction} {self.kind} {sizes}"


class Line(NamedTuple):
    """What the file holds of a row at a shape; is_chosen: the tables' own choice when that was measured."""

    shape: Shape
    row: str
    is_chosen: bool
    us: float


def shapes(
    head_dims: Iterable[int], kinds: Iterable[str] = ("plain",), paths: Iterable[str] = ("sm90",)
) -> list[Shape]:
    """The grid, in an order that spreads any beginning of it over the whole."""
    found = [
        Shape(path, direction, kind, max(1, tokens // seqlen), seqlen, seqlen, *heads, head_dim, causal)
        for path, direction, kind, head_dim, seqlen, heads, tokens, causal in itertools.product(
            paths, ("fwd", "bwd"), kinds, head_dims, SEQLENS, HEADS, TOKENS, (False, True)
        )
    ]
    return sorted(set(found), key=lambda shape: zlib.crc32(repr(shape).encode()))


def short_shapes(head_dims: Iterable[int], paths: Iterable[str] = ("sm90",)) -> list[Shape]:
    """Forwards of a few microseconds: few rows, or few queries of more keys. In an order as of ``shapes``."""
    found = []
    for path, head_dim, heads in itertools.product(paths, head_dims, SHORT_HEADS):
        start = (path, "fwd", "plain", heads // 8)
        for rows, causal in itertools.product(SHORT_SEQLENS, (False, True)):
            found.append(Shape(*start, rows, rows, 8, 8, head_dim, causal))
        few = itertools.product(FEW_QUERIES, FEW_KEYS, (1, 4)) if heads < SHORT_HEADS[-1] else ()
        for queries, keys, group in few:
            found.append(Shape(*start, queries, keys, 8 * group, 8, head_dim, False))
    return sorted(set(found), key=lambda shape: zlib.crc32(repr(shape).encode()))


def other_kernels(device: torch.device) -> timing.Call:
    """Work of a fraction of a millisecond: a product, a normalisation, a backward that no short call has."""
    x = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    q, k, v, dout = torch.randn(4, 1, 512, 8, 192, device=device, dtype=torch.bfloat16).unbind()
    out, lse = flash_ext.forward(q, k, v, softcap=20.0)

    def run() -> None:
        torch.matmul(x, x)
        flash_ext.backward(dout, q, k, v, out, lse, softcap=20.0)
        torch.layer_norm(x, x.shape[1:])

    return run


def inputs(shape: Shape, device: str) -> tuple[list[Tensor], dict]:
    """q, k and v, and the options of the call."""
    of_keys = (shape.seqlen_k, shape.num_heads_k)
    qkv = [torch.randn(shape.batch, *size, shape.head_dim, device=device, dtype=torch.bfloat16)
           for size in ((shape.seqlen_q, shape.num_heads), of_keys, of_keys)]  # fmt: skip
    options: dict = {"causal": shape.causal}
    place = torch.arange(shape.seqlen_k, device=device)
    if shape.kind == "padding":  # of half the keys on average, spread evenly
        share = (torch.arange(shape.batch, device=device)[:, None] * 2 + 1) / (2 * shape.batch)
        options["mask"] = masks.KeyMask(place < 1 + share * shape.seqlen_k)
    elif shape.kind == "documents":  # eight, whose ends do not lie on those of tiles
        ids = (place // max(7, shape.seqlen_k // 8 - 3)).int()
        options["mask"] = masks.Documents(ids, ids)  # ids of keys given apart are compared, in any call
    elif shape.kind == "slopes":
        options["bias"] = masks.ALiBi(torch.rand(shape.num_heads, device=device))
    elif shape.kind == "bias":
        size = (1, shape.num_heads, shape.seqlen_q, shape.seqlen_k)
        options["bias"] = torch.randn(size, device=device, dtype=torch.bfloat16)
    elif shape.kind == "softcap":
        options["softcap"] = 30.0
    elif shape.kind == "dropout":
        options["dropout_p"] = 0.1
    return qkv, options


def rows_of(shape: Shape, qkv: list[Tensor], options: dict, gpu: str | None = None) -> tuple[list[str], str]:
    """The rows that can serve a call, and the one that the tables choose; gpu as in flash_ext.explain."""

    def row_of(backend: str) -> str:
        found = flash_ext.explain(*qkv, **options, backend=backend, gpu=gpu)
        return (found.forward if shape.direction == "fwd" else found.backward)["row"]

    served = []
    for row in (row for path, row, _ in _C.plan_rows() if path == shape.path):
        try:
            # A row of the other direction leaves the choice of this one as it was.
            if row_of(f"{shape.path} row={row}") == row:
                served.append(row)
        except ValueError:
            continue
    return served, row_of(shape.path)


def measure(shape: Shape, timer: timing.Timer, seconds: float) -> list[Line]:
    """All rows of a shape on the same random numbers."""
    (q, k, v), options = inputs(shape, "cuda")
    rows, chosen = rows_of(shape, [q, k, v], options)
    if "dropout_p" in options:
        options["rng"] = flash_ext.dropout_rng(q.device)
    out, lse = flash_ext.forward(q, k, v, **options)
    dout = torch.randn_like(out)

    def call(row: str) -> timing.Call:
        asked = {**options, "backend": f"{shape.path} row={row}"}
        if shape.direction == "fwd":
            return lambda: flash_ext.forward(q, k, v, **asked)
        return lambda: flash_ext.backward(dout, q, k, v, out, lse, **asked)

    samples, failures = timing.measure({row: call(row) for row in rows}, timer, ROUNDS, seconds)
    for row, error in failures.items():
        print(f"{row} fails at {shape}: {error}"[:200], file=sys.stderr)
    return [Line(shape, row, row == chosen, 1e3 * found.quartiles()[1]) for row, found in samples.items()]


# ---- the file ----------------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """What has been measured; nothing if there is no file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(newline="") as file:
        found = []
        for *shape, row, chosen, us in itertools.islice(csv.reader(file), 1, None):
            of_shape = Shape(*shape[:3], *map(int, shape[3:9]), shape[9] == "True")
            found.append(Line(of_shape, row, chosen == "True", float(us)))
        return found


def append(path: Path, lines: list[Line]) -> None:
    """Adds the lines of one shape, and the header to a new file."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow((*Shape._fields, "row", "is_chosen", "us"))
        writer.writerows((*line.shape, line.row, line.is_chosen, f"{line.us:.2f}") for line in lines)


# ---- the report --------------------------------------------------------------------------------------------


def present_choice(shape: Shape, gpu: str = GPU) -> str:
    """The row that the tables as they are now choose for a shape."""
    found = plan(
        f"{shape.direction} {shape.path} batch={shape.batch} seqlen={shape.seqlen_q}/{shape.seqlen_k} "
        f"heads={shape.num_heads}/{shape.num_heads_k} head_dim={shape.head_dim} gpu={gpu} "
        f"{WORDS.get(shape.kind, shape.kind)} {'causal' if shape.causal else ''}"
    )
    return str(found["row"])


def with_present_choices(lines: list[Line], gpu: str = GPU) -> list[Line]:
    """The same times, marked by the tables as they are now."""
    chosen = {shape: present_choice(shape, gpu) for shape in {line.shape for line in lines}}
    return [line._replace(is_chosen=line.row == chosen[line.shape]) for line in lines]


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
        groups[f"{shape.path} {shape.direction} {shape.kind} D{shape.head_dim}"].append(ratio)
    text = [f"{len(by_shape)} shapes"]
    text.append("time of the choice over that of the fastest row, geometric mean and worst:")
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
    parser.add_argument("--kinds", default="plain", help="of " + ",".join(KINDS))
    parser.add_argument("--paths", default="sm90", help="of sm90,sm80")
    parser.add_argument("--short", action="store_true", help="forwards of few rows or keys, not --kinds")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop after so long (default 4)")
    parser.add_argument("--seconds", type=float, default=0.01, help="a shape (default 0.01)")
    parser.add_argument("--out", type=Path, help="CSV that is gone on with")
    parser.add_argument("--report", type=Path, help="CSV of an H200 to report on, without measuring")
    options = parser.parse_args()
    if options.report:
        print(report(with_present_choices(read(options.report))))
        return 0
    if options.out is None:
        parser.error("--out or --report is needed")
    if machine.device_asked_for(options, parser, "--head-dims 64") != "cuda":
        parser.error("rows are those of a GPU")
    device, end = torch.device("cuda"), time.monotonic() + 60 * options.minutes
    timer = timing.CudaTimer(device, other_kernels(device) if options.short else None)
    done = {line.shape for line in read(options.out)}
    head_dims, paths = map(int, options.head_dims.split(",")), options.paths.split(",")
    asked = (
        short_shapes(head_dims, paths)
        if options.short
        else shapes(head_dims, options.kinds.split(","), paths)
    )
    wanted = [shape for shape in asked if shape not in done]
    for at, shape in enumerate(wanted):
        if time.monotonic() > end:
            print(f"{len(wanted) - at} of {len(wanted)} shapes are left: run the same again")
            break
        append(options.out, measure(shape, timer, options.seconds))
    print(report(read(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
