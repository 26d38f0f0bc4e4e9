"""Looks for slow shape classes: a sweep over (head_dim, seqlen, feature) at about constant work.

    python -m bench.cliffs --out cliffs.json           # about 2 minutes
    python -m bench.cliffs --head-dims 32 --kinds plain,bias1h_grad

Each point is timed forward and backward, beside PyTorch's memory-efficient backend. Two things may be wrong
with a point, and the program names and counts both:

behind: the backend takes less time. It gets an fp32 bias rounded, since it has none in fp32.
cliff: the time a visible score is more than twice that of a neighbour, the next shorter or longer sequence,
    and so is the time over the floor, since a score of a short sequence has more bytes to move. The floor is
    the bytes that must move at the speed of a copy, plus the products at the speed of a matrix product, both
    measured in this run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
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
KINDS = ("plain", "causal", "key_padding", "bias1h", "bias1h_grad", "bias11_grad", "biasb1_grad",
         "biasbh_grad", "bias1h_row", "fp32bias1h_grad", "dropout", "documents")  # fmt: skip
MOST_SCORES, MOST_ELEMENTS, MOST_BATCH = 2**28, 2**26, 16384
OURS, PEER = "flash_ext", "efficient"
NEIGHBOURS = 2.0  # times the time over the floor


@dataclass
class Point:
    """One shape and feature in one direction; times in microseconds, None where a program refuses.

    over_floor: our time over the floor of this run.
    scores: that are visible, of all batch entries and heads.
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


def batch_of(seqlen: int, heads: int, head_dim: int) -> int:
    """As many sequences as make the work of all points about the same."""
    by_scores, by_elements = MOST_SCORES // (seqlen**2 * heads), MOST_ELEMENTS // (seqlen * heads * head_dim)
    return max(1, min(by_scores, by_elements, MOST_BATCH))


def bias_of(kind: str, batch: int, heads: int, seqlen: int) -> Tensor | None:
    """The bias that a kind names by its batch entries and heads: 1 for one that is shared."""
    if "bias" not in kind:
        return None
    entries = kind.removeprefix("fp32").removeprefix("bias")
    shape = [batch if entries[0] == "b" else 1, heads if entries[1] == "h" else 1, seqlen, seqlen]
    if kind.endswith("row"):
        shape[2] = 1
    dtype = torch.float32 if kind.startswith("fp32") else torch.bfloat16
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=kind.endswith("grad"))


def calls_of(head_dim: int, seqlen: int, batch: int, heads: int, kind: str) -> Calls:
    """Both programs on the same random numbers, each in its own layout."""
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16)
                     for _ in range(4))  # fmt: skip
    options: dict = {"causal": kind == "causal"}
    peer: dict | None = {"is_causal": kind == "causal"}
    bias = bias_of(kind, batch, heads, seqlen)
    learned, peer_learned = [], []
    visible = seqlen**2 * (0.5 if kind == "causal" else 1.0)  # scores of a head
    if bias is not None:
        options["bias"] = bias
        rounded = bias.detach().to(torch.bfloat16).requires_grad_(bias.requires_grad)
        peer["attn_mask"] = rounded.expand(batch, heads, seqlen, seqlen)
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
        out = program(*leaves)
        return lambda: torch.autograd.grad(out, leaves + others, dout, retain_graph=True)

    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v, dout)]
    forward = {OURS: without_gradient(ours, [q, k, v])}
    backward = {OURS: of_gradients(ours, [q, k, v], learned, dout)}
    if peer is not None:
        forward[PEER] = without_gradient(theirs, heads_first[:3])
        backward[PEER] = of_gradients(theirs, heads_first[:3], peer_learned, heads_first[3])
    moved = 2.0 * q.numel()
    of_bias = 0.0 if bias is None else float(bias.numel() * bias.element_size())
    least_bytes = (4 * moved + of_bias, 8 * moved + 2 * of_bias)
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


def sweep(head_dims: list[int], seqlens: list[int], kinds: list[str], timer: timing.Timer,
          speeds: tuple[float, float], seconds: float) -> Iterator[Point]:  # fmt: skip
    """All points, one after the other. speeds: bytes and operations a microsecond."""
    for head_dim in head_dims:
        heads = HEADS[head_dim]
        for seqlen in seqlens:
            batch = batch_of(seqlen, heads, head_dim)
            for kind in kinds:
                bias = 4 * batch * heads * seqlen**2 if kind.startswith("biasbh") else 0
                if bias > 2**31:
                    continue
                calls = calls_of(head_dim, seqlen, batch, heads, kind)
                for at, (direction, both) in enumerate((("fwd", calls.forward), ("bwd", calls.backward))):
                    samples, failures = timing.measure(both, timer, 2, seconds)
                    for name, error in failures.items():
                        where = f"D{head_dim} S{seqlen} {kind} {direction}"
                        print(f"{name} refuses {where}: {error}"[:150], file=sys.stderr)
                    us = {name: 1e3 * sample.quartiles()[1] for name, sample in samples.items()}
                    product = 2.0 * calls.scores * head_dim
                    floor = calls.bytes[at] / speeds[0] + (2, 5)[at] * product / speeds[1]
                    ours = us.get(OURS)
                    kernel = kernel_of(both[OURS]) if ours else ""
                    yield Point(head_dim, seqlen, batch, heads, kind, direction, ours, us.get(PEER),
                                ours and ours / floor, calls.scores, kernel)  # fmt: skip
                del calls
            torch.cuda.empty_cache()


def behind(points: list[Point]) -> list[str]:
    """Points at which the peer is faster, slowest first."""
    slow = [(p.peer_us / p.ours_us, p) for p in points if p.ours_us and p.peer_us and p.peer_us < p.ours_us]
    slow.sort(key=lambda pair: pair[0])
    return [f"{p.name}: {ratio:.2f} of {PEER}, {p.ours_us:.0f} us in {p.kernel}" for ratio, p in slow]


def steepness(point: Point, neighbour: Point) -> float:
    """How many times as long a point takes: a visible score or over the floor, whichever differs less."""
    a_score = [p.ours_us / p.scores for p in (point, neighbour)]
    return min(a_score[0] / a_score[1], point.over_floor / neighbour.over_floor)


def cliffs(points: list[Point]) -> list[str]:
    """Points that take more than NEIGHBOURS times as long as a neighbour in the length."""
    lines: dict[tuple, list[Point]] = {}
    for point in points:
        if point.ours_us:
            lines.setdefault((point.head_dim, point.kind, point.direction), []).append(point)
    found = []
    for line in lines.values():
        line.sort(key=lambda p: p.seqlen)
        for at, point in enumerate(line):
            beside = line[max(at - 1, 0) : at] + line[at + 1 : at + 2]
            steep = max((steepness(point, other) for other in beside), default=0.0)
            if steep > NEIGHBOURS:
                over = f"{steep:.2f} times a neighbour, {point.over_floor:.1f} times the floor"
                found.append(f"{point.name}: {over}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    machine.add_device_option(parser)
    parser.add_argument("--head-dims", default=",".join(map(str, HEADS)))
    parser.add_argument("--seqlens", default=",".join(map(str, SEQLENS)))
    parser.add_argument("--kinds", default=",".join(KINDS))
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
    asked = [[int(n) for n in text.split(",")] for text in (options.head_dims, options.seqlens)]
    points = list(sweep(*asked, options.kinds.split(","), timer, speeds, options.seconds))
    slow, steep = behind(points), cliffs(points)
    for title, found in ((f"behind {PEER}", slow), (f"above {NEIGHBOURS:g} times a neighbour", steep)):
        print(f"{len(found)} of {len(points)} points {title}", *found, sep="\n  ")
    if options.out:
        rows = [asdict(point) for point in points]
        options.out.write_text(json.dumps({"machine": facts, "speeds": speeds, "points": rows}, indent=0))
    return 1 if slow or steep else 0


if __name__ == "__main__":
    sys.exit(main())
