"""Looks for slow shape classes: a sweep over (head_dim, seqlen, feature) at about constant work.

    python -m bench.cliffs --out cliffs.json           # about 2 minutes
    python -m bench.cliffs --head-dims 32 --kinds plain,bias_1hqk_grad

Each point is timed forward and backward, beside PyTorch's memory-efficient backend. Three things may be wrong
with a point. The program names and counts each of them:

refused: flash_ext raises.
behind: the backend takes less time. It gets an fp32 bias rounded, since it has none in fp32.
cliff: the time a visible score is more than twice that of a neighbour, and so is the time over the floor. A
    neighbour has the next length, or another number of heads. The floor is the bytes that must move at the
    speed of a copy, plus the products at the speed of a matrix product, both measured in this run.

A score of a short sequence has more bytes to move, so its time is allowed to grow with the floor. How many
points exceed twice a neighbour by the time a score alone is counted beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from bench import machine, timing
from flash_ext import masks

HEADS = {32: 4, 64: 12, 80: 12, 128: 16, 256: 8}
SEQLENS = (16, 49, 77, 128, 197, 256, 577, 1024, 4096)
# The letters of a bias are its sizes: batch, heads, queries, keys; 1 where it is the same for all of them. A
# bias that is the same for all queries and keys is left out: it moves all scores of a head alike.
KINDS = ("plain", "causal", "key_padding", "dropout", "documents", "bias_1hqk", "bias_1hqk_grad",
         "bias_11qk_grad", "bias_b1qk_grad", "bias_bhqk_grad", "bias_1h1k",
         "fp32_bias_1hqk_grad")  # fmt: skip
# These are swept at two head sizes only.
RARE_KINDS = ("cross", "few_rows", "bias_11qk", "bias_b1qk", "bias_bh1k_grad", "bias_b11k_grad",
              "bias_1h1k_grad", "bias_111k_grad", "bias_bhq1_grad", "bias_1hq1_grad", "bias_b1q1_grad",
              "bias_11q1_grad",
              "fp16_bias_1hqk_grad", "fp32_bias_11qk_grad", "fp32_bias_b1qk_grad",
              "fp32_bias_bh1k_grad")  # fmt: skip
RARE_HEAD_DIMS = (32, 128)
ONE_HEAD_KINDS = ("plain", "bias_1hqk_grad")  # also swept with one head, and more sequences
CROSS_KEYS = 77
FEW_ROWS = 16  # of "few_rows", whose lengths are numbers of keys
MOST_SCORES, MOST_ELEMENTS, MOST_BATCH = 2**28, 2**26, 2**15
OURS, PEER = "flash_ext", "efficient"
NEIGHBOURS = 2.0  # times the time of a neighbour
NEARLY, AGAIN = 0.97, 10  # of that, from where on points are measured again, and for how many times as long


@dataclass
class Point:
    """One shape and feature in one direction; times in microseconds, None where a program refuses.

    seqlen: of queries, and but for "cross" of keys; of "few_rows" that of keys.
    over_floor: our time over the floor of this run.
    scores: that are visible, of all batch entries and heads.
    refusal: what flash_ext raises.
    """

    head_dim: int
    seqlen: int
    batch: int
    num_heads: int
    kind: str
    direction: str
    ours_us: float | None
    peer_us: float | None
    over_floor: float | None
    scores: float
    kernel: str = ""
    refusal: str = ""

    @property
    def name(self) -> str:
        return f"D{self.head_dim} S{self.seqlen} B{self.batch} H{self.num_heads} {self.kind} {self.direction}"


@dataclass
class Calls:
    """What is timed at one point, and the least it has to move and to multiply."""

    forward: dict[str, timing.Call]
    backward: dict[str, timing.Call]
    bytes: tuple[float, float]
    scores: float


def classes(head_dim: int, kinds: list[str] | None) -> Iterator[tuple[int, str]]:
    """Heads and kind of what is swept at one head_dim; ``kinds``: None for all that belong there."""
    for kind in kinds or [*KINDS, *(RARE_KINDS if head_dim in RARE_HEAD_DIMS else ())]:
        yield HEADS[head_dim], kind
        if kind in ONE_HEAD_KINDS:
            yield 1, kind


def batch_of(seqlen_q: int, seqlen_k: int, heads: int, head_dim: int) -> int:
    """As many sequences as make the work of all points about the same."""
    by_scores = MOST_SCORES // (seqlen_q * seqlen_k * heads)
    by_elements = MOST_ELEMENTS // (max(seqlen_q, seqlen_k) * heads * head_dim)
    return max(1, min(by_scores, by_elements, MOST_BATCH))


def dtype_of(kind: str) -> torch.dtype:
    """Of q, k and v."""
    return torch.float16 if kind.startswith("fp16") else torch.bfloat16


def bias_of(kind: str, *sizes: int) -> Tensor | None:
    """The bias that a kind names; ``sizes``: batch, heads, queries, keys."""
    if "bias" not in kind:
        return None
    letters = kind.split("bias_")[1].removesuffix("_grad")
    shape = [1 if letter == "1" else size for letter, size in zip(letters, sizes, strict=True)]
    dtype = torch.float32 if kind.startswith("fp32") else dtype_of(kind)
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=kind.endswith("grad"))


def calls_of(head_dim: int, seqlen: int, seqlen_k: int, batch: int, heads: int, kind: str) -> Calls:
    """Both programs on the same random numbers, each in its own layout."""
    q, k, v, dout = (torch.randn(batch, rows, heads, head_dim, device="cuda", dtype=dtype_of(kind))
                     for rows in (seqlen, seqlen_k, seqlen_k, seqlen))  # fmt: skip
    options: dict = {"causal": kind == "causal"}
    peer: dict | None = {"is_causal": kind == "causal"}
    bias = bias_of(kind, batch, heads, seqlen, seqlen_k)
    learned, peer_learned = [], []
    visible = seqlen * seqlen_k * (0.5 if kind == "causal" else 1.0)  # scores of a head
    if bias is not None:
        options["bias"] = bias
        rounded = bias.detach().to(dtype_of(kind)).requires_grad_(bias.requires_grad)
        peer["attn_mask"] = rounded.expand(batch, heads, seqlen, seqlen_k)
        learned, peer_learned = ([bias], [rounded]) if bias.requires_grad else ([], [])
    elif kind == "key_padding":
        # Spread evenly: of few random lengths the mean, and with it the work, is a matter of luck.
        lengths = 1 + (torch.arange(batch, device="cuda")[:, None] * 2 + 1) * seqlen // (2 * batch)
        keep = torch.arange(seqlen, device="cuda")[None] < lengths
        options["mask"], peer["attn_mask"] = masks.KeyMask(keep), keep[:, None, None]
        visible = seqlen * float(lengths.float().mean())
    elif kind == "dropout":
        options["dropout_p"] = peer["dropout_p"] = 0.1
    elif kind == "documents":
        # Their ends do not lie on those of tiles, at any length.
        ids = (torch.arange(seqlen, device="cuda") // max(7, seqlen // 8 - 3)).int()
        visible = float(ids.bincount().square().sum())
        options["mask"], peer = masks.Documents(ids), None

    def ours(*qkv: Tensor) -> Tensor:
        return flash_ext.attention(*qkv, **options)

    def theirs(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(*qkv, **peer)

    def without_gradient(program, inputs: list[Tensor]) -> timing.Call:
        def call() -> Tensor:
            with torch.no_grad():
                return program(*inputs)

        return call

    def of_gradients(program, inputs: list[Tensor], others: list[Tensor], dout: Tensor) -> timing.Call:
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs: list[Tensor] = []

        def call() -> tuple[Tensor, ...]:
            if not outputs:  # at the first call, which may be refused as any other
                outputs.append(program(*leaves))
            return torch.autograd.grad(outputs, leaves + others, dout, retain_graph=True)

        return call

    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v, dout)]
    forward = {OURS: without_gradient(ours, [q, k, v])}
    backward = {OURS: of_gradients(ours, [q, k, v], learned, dout)}
    if peer is not None:
        forward[PEER] = without_gradient(theirs, heads_first[:3])
        backward[PEER] = of_gradients(theirs, heads_first[:3], peer_learned, heads_first[3])
    moved = 2.0 * (q.numel() + k.numel())
    of_bias = 0.0 if bias is None else float(bias.numel() * bias.element_size())
    least_bytes = (2 * moved + of_bias, 4 * moved + 2 * of_bias)
    return Calls(forward, backward, least_bytes, batch * heads * visible)


def kernel_of(call: timing.Call) -> str:
    """The name of the kernel that a call of ours launches."""
    from flash_ext._ops.library import _C

    _C.set_switch("record_launches", 1)
    try:
        call()
        return _C.last_launch()["kernel"]
    finally:
        _C.set_switch("record_launches", None)


Place = tuple[int, int, int, str]  # head_dim, seqlen, heads, kind


def places(head_dims: list[int], seqlens: list[int], kinds: list[str] | None) -> Iterator[Place]:
    """Where the sweep has points, two each."""
    for head_dim in head_dims:
        for seqlen in seqlens:
            for heads, kind in classes(head_dim, kinds):
                yield head_dim, seqlen, heads, kind


def measured_at(
    place: Place, timer: timing.Timer, speeds: tuple[float, float], seconds: float
) -> Iterator[Point]:
    """Its points, forward and backward. speeds: bytes and operations a microsecond."""
    head_dim, seqlen, heads, kind = place
    seqlen_q = FEW_ROWS if kind == "few_rows" else seqlen
    seqlen_k = CROSS_KEYS if kind == "cross" else seqlen
    batch = batch_of(seqlen_q, seqlen_k, heads, head_dim)
    calls = calls_of(head_dim, seqlen_q, seqlen_k, batch, heads, kind)
    for at, (direction, both) in enumerate((("fwd", calls.forward), ("bwd", calls.backward))):
        samples, failures = timing.measure(both, timer, 2, seconds)
        us = {name: 1e3 * sample.quartiles()[1] for name, sample in samples.items()}
        product = 2.0 * calls.scores * head_dim
        floor = calls.bytes[at] / speeds[0] + (2, 5)[at] * product / speeds[1]
        ours = us.get(OURS)
        kernel = kernel_of(both[OURS]) if ours else ""
        point = Point(head_dim, seqlen, batch, heads, kind, direction, ours, us.get(PEER),
                      ours and ours / floor, calls.scores, kernel, str(failures.get(OURS, "")))  # fmt: skip
        if PEER in failures:
            print(f"{PEER} refuses {point.name}: {failures[PEER]}"[:150], file=sys.stderr)
        yield point
    del calls
    torch.cuda.empty_cache()


def doubtful(points: list[Point]) -> list[Place]:
    """Places of the points above or near NEIGHBOURS times a neighbour, and of those neighbours."""
    found: dict[Place, None] = {}
    for point, beside in neighbours(points):
        for other in beside:
            if steepness(point, other) > NEARLY * NEIGHBOURS:
                found |= dict.fromkeys((p.head_dim, p.seqlen, p.num_heads, p.kind) for p in (point, other))
    return list(found)


def sweep(wanted: list[Place], timer: timing.Timer, speeds: tuple[float, float],
          seconds: float) -> list[Point]:  # fmt: skip
    """All points. Where one may be a cliff it and its neighbour are measured again, longer: of few launches
    medians differ by a percent."""
    found = {place: list(measured_at(place, timer, speeds, seconds)) for place in wanted}
    for place in doubtful([point for both in found.values() for point in both]):
        found[place] = list(measured_at(place, timer, speeds, AGAIN * seconds))
    return [point for both in found.values() for point in both]


def refused(points: list[Point]) -> list[str]:
    """Points that have no time of ours."""
    return [f"{p.name}: {p.refusal[:150]}" for p in points if p.ours_us is None]


def behind(points: list[Point]) -> list[str]:
    """Points at which the peer is faster, slowest first."""
    slow = [(p.peer_us / p.ours_us, p) for p in points if p.ours_us and p.peer_us and p.peer_us < p.ours_us]
    slow.sort(key=lambda pair: pair[0])
    return [f"{p.name}: {ratio:.2f} of {PEER}, {p.ours_us:.0f} us in {p.kernel}" for ratio, p in slow]


def by_score(point: Point, neighbour: Point) -> float:
    """How many times as long a visible score takes."""
    return (point.ours_us / point.scores) / (neighbour.ours_us / neighbour.scores)


def steepness(point: Point, neighbour: Point) -> float:
    """How many times as long a point takes: a visible score or over the floor, whichever differs less."""
    return min(by_score(point, neighbour), point.over_floor / neighbour.over_floor)


def neighbours(points: list[Point]) -> Iterator[tuple[Point, list[Point]]]:
    """Every point that has a time, with those of the next lengths and of other numbers of heads."""
    lines: dict[tuple, list[Point]] = {}
    columns: dict[tuple, list[Point]] = {}
    for point in sorted((p for p in points if p.ours_us), key=lambda p: p.seqlen):
        same = (point.head_dim, point.kind, point.direction)
        lines.setdefault((*same, point.num_heads), []).append(point)
        columns.setdefault((*same, point.seqlen), []).append(point)
    for line in lines.values():
        for at, point in enumerate(line):
            column = columns[point.head_dim, point.kind, point.direction, point.seqlen]
            beside = line[max(at - 1, 0) : at] + line[at + 1 : at + 2]
            yield point, beside + [p for p in column if p is not point]


def cliffs(points: list[Point], measured: Callable[[Point, Point], float] = steepness) -> list[str]:
    """Points that take more than NEIGHBOURS times as long as a neighbour."""
    found = []
    for point, beside in neighbours(points):
        steep = max((measured(point, other) for other in beside), default=0.0)
        if steep > NEIGHBOURS:
            over = f"{steep:.2f} times a neighbour, {point.over_floor:.1f} times the floor"
            found.append(f"{point.name}: {over}")
    return found


def faults(points: list[Point]) -> dict[str, list[str]]:
    """What is wrong, a line each, by title."""
    return {
        f"refused by {OURS}": refused(points),
        f"behind {PEER}": behind(points),
        f"above {NEIGHBOURS:g} times a neighbour": cliffs(points),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    machine.add_device_option(parser)
    parser.add_argument("--head-dims", default=",".join(map(str, HEADS)))
    parser.add_argument("--seqlens", default=",".join(map(str, SEQLENS)))
    every = ",".join((*KINDS, *RARE_KINDS))
    parser.add_argument(
        "--kinds", default=None, help=f"of {every}; default: all, some at two head sizes only"
    )
    parser.add_argument("--seconds", type=float, default=0.02, help="a point (default 0.02)")
    parser.add_argument("--out", type=Path, default=None, help="JSON with all points")
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    options = parser.parse_args()
    if machine.device_asked_for(options, parser, "--seqlens 16") != "cuda":
        parser.error("the memory-efficient backend needs a GPU")
    device = torch.device("cuda")
    facts, timer = machine.collect(device, options.commit), timing.make_timer(device)
    matmul = timing.matmul_tflops(timer, device, torch.bfloat16)
    speeds = (timing.copy_gbps(timer, device) * 1e3, matmul * 1e6)
    head_dims, seqlens = ([int(n) for n in text.split(",")] for text in (options.head_dims, options.seqlens))
    kinds = options.kinds.split(",") if options.kinds else None
    points = sweep(list(places(head_dims, seqlens, kinds)), timer, speeds, options.seconds)
    found, strict = faults(points), cliffs(points, by_score)
    for title, lines in found.items():
        print(f"{len(lines)} of {len(points)} points {title}", *lines, sep="\n  ")
    print(
        f"{len(strict)} of {len(points)} points above {NEIGHBOURS:g} times a neighbour by time a score alone"
    )
    if options.out:
        record = {"machine": facts, "speeds": speeds, "faults": found, "by_score_alone": strict}
        record["points"] = [asdict(point) for point in points]
        options.out.write_text(json.dumps(record, indent=0))
    return 1 if any(found.values()) or not points else 0


if __name__ == "__main__":
    sys.exit(main())
