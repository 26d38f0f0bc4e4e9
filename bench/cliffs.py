"""Looks for slow shape classes: a sweep over (head_dim, seqlen, feature) at about constant work.

    python -m bench.cliffs --out cliffs.json           # about 3 minutes
    python -m bench.cliffs --head-dims 32 --kinds plain,bias_1hqk_grad
    python -m bench.cliffs --report cliffs.json.gz     # the verdicts on a stored file, anywhere

Each point is timed forward and backward, beside PyTorch's memory-efficient backend. Three things may be
wrong with a point. The program names and counts each of them:

refused: flash_ext raises.
behind: the backend takes less time. It gets an fp32 bias rounded, since it has none in fp32. A bias that is
    the same for all keys is written out for it, and documents are a bool mask. Points that it refuses are
    counted apart.
cliff: a visible score takes more than twice as long as at a neighbour.

A neighbour has the next length, another number of heads, or the next head_dim. A larger head_dim may take
longer a score by the ratio of the two, since products and rows grow with it; a smaller one may take as long,
since exponentials, masks and biases do not shrink with it.

A length is at most 1.6 times the one before it, from 1024 on twice, and around 128 and 256, the sizes of
tiles, less. Between lengths further apart a score may take twice as long by itself: with 16 keys it has three
times as many bytes to move as with 49, and of 77 keys a tile of 128 is a third full.

The floor of a point is the longer of two times: that of the bytes that must move, at the speed of a copy,
and that of the products, at the speed of a matrix product. Both speeds are measured in this run. It is
printed beside cliffs, and decides nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from bench import machine, timing
from bench.record import stored_text
from flash_ext import masks

HEADS = {32: 4, 64: 12, 80: 12, 128: 16, 256: 8}
SEQLENS = (16, 24, 32, 49, 77, 96, 112, 128, 197, 224, 256, 320, 384, 577, 640, 768, 1024, 2048, 4096)
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

Sizes = tuple[int, int, int, int]  # batch, heads, queries, keys


@dataclass
class Point:
    """One shape and feature in one direction; times in microseconds, None where a program refuses.

    seqlen: of queries, and but for "cross" of keys; of "few_rows" that of keys.
    over_floor: our time over the floor of this run.
    scores: that are visible, of all batch entries and heads.
    refusal, peer_refusal: what flash_ext and the backend raise.
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
    peer_refusal: str = ""

    @property
    def sizes(self) -> Sizes:
        return (self.batch, self.num_heads, *lengths_of(self.seqlen, self.kind))

    @property
    def name(self) -> str:
        return f"D{self.head_dim} S{self.seqlen} B{self.batch} H{self.num_heads} {self.kind} {self.direction}"


@dataclass
class Calls:
    """What is timed at one place, and how many scores are visible."""

    forward: dict[str, timing.Call]
    backward: dict[str, timing.Call]
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


def lengths_of(seqlen: int, kind: str) -> tuple[int, int]:
    """How many queries and keys a sequence of a kind has."""
    return FEW_ROWS if kind == "few_rows" else seqlen, CROSS_KEYS if kind == "cross" else seqlen


def document_length(seqlen: int) -> int:
    """Of documents in a sequence but the last one."""
    return max(7, seqlen // 8 - 3)


def bias_shape(kind: str, sizes: Sizes) -> list[int] | None:
    """That of the bias that a kind names, if it names one."""
    if "bias" not in kind:
        return None
    letters = kind.split("bias_")[1].removesuffix("_grad")
    return [1 if letter == "1" else size for letter, size in zip(letters, sizes, strict=True)]


def bias_dtype(kind: str) -> torch.dtype:
    return torch.float32 if kind.startswith("fp32") else dtype_of(kind)


def bias_of(kind: str, sizes: Sizes, device: str = "cuda") -> Tensor | None:
    """The bias that a kind names."""
    shape = bias_shape(kind, sizes)
    if shape is None:
        return None
    return torch.randn(shape, device=device, dtype=bias_dtype(kind), requires_grad=kind.endswith("grad"))


def least_bytes(kind: str, sizes: Sizes, head_dim: int, direction: str) -> float:
    """Of q, k, v and the output, in a backward of their gradients too, and of the bias and its gradient."""
    batch, heads, seqlen_q, seqlen_k = sizes
    one_of_each = dtype_of(kind).itemsize * batch * heads * (seqlen_q + seqlen_k) * head_dim  # q and k
    shape = bias_shape(kind, sizes)
    of_bias = math.prod(shape) * bias_dtype(kind).itemsize if shape else 0
    if direction == "fwd":
        return 2.0 * one_of_each + of_bias
    return 4.0 * one_of_each + (2.0 if kind.endswith("grad") else 1.0) * of_bias


def floor_of(point: Point, speeds: tuple[float, float]) -> float:
    """Microseconds. speeds: bytes and operations a microsecond."""
    products = 2 if point.direction == "fwd" else 5
    bytes_moved = least_bytes(point.kind, point.sizes, point.head_dim, point.direction)
    return max(bytes_moved / speeds[0], products * 2.0 * point.scores * point.head_dim / speeds[1])


def over_the_floor(points: list[Point], speeds: tuple[float, float]) -> list[Point]:
    """The same points with their time over the floor."""
    return [replace(p, over_floor=p.ours_us and p.ours_us / floor_of(p, speeds)) for p in points]


def written_out(bias: Tensor, sizes: Sizes) -> Tensor:
    """As the backend takes it: keys side by side in memory. Gradients come back to ``bias``."""
    with torch.enable_grad():
        return bias.expand(-1, -1, -1, sizes[3]).contiguous().expand(sizes)


def calls_of(
    head_dim: int, sizes: Sizes, kind: str,
    device: str = "cuda", backend: SDPBackend = SDPBackend.EFFICIENT_ATTENTION,
) -> Calls:  # fmt: skip
    """Both programs on the same random numbers, each in its own layout."""
    batch, heads, seqlen, seqlen_k = sizes
    q, k, v, dout = (torch.randn(batch, rows, heads, head_dim, device=device, dtype=dtype_of(kind))
                     for rows in (seqlen, seqlen_k, seqlen_k, seqlen))  # fmt: skip
    options: dict = {"causal": kind == "causal"}
    peer: dict = {"is_causal": kind == "causal"}
    bias = bias_of(kind, sizes, device)
    learned, peer_learned = [], []
    visible = seqlen * seqlen_k * (0.5 if kind == "causal" else 1.0)  # scores of a head
    if bias is not None:
        options["bias"] = bias
        rounded = bias.detach().to(dtype_of(kind)).requires_grad_(bias.requires_grad)
        learned, peer_learned = ([bias], [rounded]) if bias.requires_grad else ([], [])
    elif kind == "key_padding":
        # Spread evenly: of few random lengths the mean, and with it the work, is a matter of luck.
        lengths = 1 + (torch.arange(batch, device=device)[:, None] * 2 + 1) * seqlen // (2 * batch)
        keep = torch.arange(seqlen, device=device)[None] < lengths
        options["mask"] = masks.KeyMask(keep)
        visible = seqlen * float(lengths.float().mean())
    elif kind == "dropout":
        options["dropout_p"] = peer["dropout_p"] = 0.1
    elif kind == "documents":
        # Their ends do not lie on those of tiles, at any length.
        ids = (torch.arange(seqlen, device=device) // document_length(seqlen)).int()
        options["mask"] = masks.Documents(ids)
        visible = float(ids.bincount().square().sum())

    @functools.cache  # made at the first call, which is not timed and may be refused
    def peer_mask() -> Tensor | None:
        if bias is not None:
            return written_out(rounded, sizes)
        if kind == "key_padding":
            return keep[:, None, None]
        return (ids[:, None] == ids)[None, None] if kind == "documents" else None

    def ours(*qkv: Tensor) -> Tensor:
        return flash_ext.attention(*qkv, **options)

    def theirs(*qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*qkv, attn_mask=peer_mask(), **peer)

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
    forward = {OURS: without_gradient(ours, [q, k, v]), PEER: without_gradient(theirs, heads_first[:3])}
    backward = {OURS: of_gradients(ours, [q, k, v], learned, dout),
                PEER: of_gradients(theirs, heads_first[:3], peer_learned, heads_first[3])}  # fmt: skip
    return Calls(forward, backward, batch * heads * visible)


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
    seqlen_q, seqlen_k = lengths_of(seqlen, kind)
    batch = batch_of(seqlen_q, seqlen_k, heads, head_dim)
    calls = calls_of(head_dim, (batch, heads, seqlen_q, seqlen_k), kind)
    for direction, both in (("fwd", calls.forward), ("bwd", calls.backward)):
        samples, failures = timing.measure(both, timer, 2, seconds)
        us = {name: 1e3 * sample.quartiles()[1] for name, sample in samples.items()}
        refusals = (str(failures.get(name, "")) for name in (OURS, PEER))
        kernel = kernel_of(both[OURS]) if OURS in us else ""
        point = Point(head_dim, seqlen, batch, heads, kind, direction, us.get(OURS), us.get(PEER), None,
                      calls.scores, kernel, *refusals)  # fmt: skip
        yield from over_the_floor([point], speeds)
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


def with_peer(points: list[Point]) -> list[Point]:
    """Points that both programs have a time of."""
    return [p for p in points if p.ours_us and p.peer_us]


def behind(points: list[Point]) -> list[str]:
    """Points at which the peer is faster, slowest first."""
    slow = [(p.peer_us / p.ours_us, p) for p in with_peer(points) if p.peer_us < p.ours_us]
    slow.sort(key=lambda pair: pair[0])
    return [f"{p.name}: {ratio:.2f} of {PEER}, {p.ours_us:.0f} us in {p.kernel}" for ratio, p in slow]


def steepness(point: Point, neighbour: Point) -> float:
    """How many times as long a visible score takes, over the ratio of head_dims where that is above 1."""
    longer = (point.ours_us / point.scores) / (neighbour.ours_us / neighbour.scores)
    return longer / max(1.0, point.head_dim / neighbour.head_dim)


def neighbours(points: list[Point]) -> Iterator[tuple[Point, list[Point]]]:
    """Every point that has a time, with those of the next lengths, other numbers of heads and next head_dims.

    The neighbour at another head_dim has one head where the point has one, and else several.
    """
    lines: dict[tuple, list[Point]] = {}
    columns: dict[tuple, list[Point]] = {}
    timed = sorted((p for p in points if p.ours_us), key=lambda p: (p.head_dim, p.seqlen))
    for point in timed:
        for line in lines_through(point):
            lines.setdefault(line, []).append(point)
        columns.setdefault(column_of(point), []).append(point)
    for point in timed:
        beside = []
        for line in (lines[name] for name in lines_through(point)):
            at = next(i for i, other in enumerate(line) if other is point)
            beside += line[max(at - 1, 0) : at] + line[at + 1 : at + 2]
        yield point, beside + [p for p in columns[column_of(point)] if p is not point]


def lines_through(point: Point) -> tuple[tuple, tuple]:
    """Names of the points of all lengths and of all head_dims that a point is among."""
    same = (point.kind, point.direction)
    return (
        ("lengths", *same, point.head_dim, point.num_heads),
        ("head_dims", *same, point.seqlen, point.num_heads == 1),
    )


def column_of(point: Point) -> tuple:
    """The name of the points of all numbers of heads."""
    return (point.kind, point.direction, point.head_dim, point.seqlen)


def cliffs(points: list[Point]) -> list[str]:
    """A line for each point that takes more than NEIGHBOURS times as long as a neighbour."""
    lines = []
    for point, beside in neighbours(points):
        ratio, other = max(
            ((steepness(point, p), p) for p in beside), key=lambda pair: pair[0], default=(0, point)
        )
        if ratio > NEIGHBOURS:
            where = f"D{other.head_dim} S{other.seqlen} H{other.num_heads}"
            lines.append(f"{point.name}: {ratio:.2f} times {where}, {point.over_floor:.1f} times the floor")
    return lines


def faults(points: list[Point]) -> dict[str, list[str]]:
    """What is wrong, a line each, by title."""
    return {
        f"refused by {OURS}": refused(points),
        f"behind {PEER}": behind(points),
        f"above {NEIGHBOURS:g} times a neighbour": cliffs(points),
    }


def summary(points: list[Point]) -> str:
    """The faults, each point named, and how many points have no peer."""
    (refusals, slower, steep), all_of_them = faults(points).items(), f"of {len(points)} points"
    apart = Counter(p.kind for p in points if p.peer_us is None)
    lines = [f"{len(refusals[1])} {all_of_them} {refusals[0]}", *(f"  {line}" for line in refusals[1])]
    lines += [f"{len(slower[1])} of {len(with_peer(points))} points with a peer {slower[0]}"]
    lines += [f"  {line}" for line in slower[1]]
    lines += [f"{apart.total()} {all_of_them} without a peer"]
    lines += [f"  {count} of {kind}" for kind, count in apart.items()]
    lines += [f"{len(steep[1])} {all_of_them} {steep[0]}", *(f"  {line}" for line in steep[1])]
    return "\n".join(lines)


def report(file: Path) -> tuple[list[Point], str]:
    """Points and summary of a stored file, its floor made anew."""
    record = json.loads(stored_text(file))
    points = over_the_floor([Point(**fields) for fields in record["points"]], record["speeds"])
    return points, summary(points)


def main(arguments: list[str] | None = None) -> int:
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
    parser.add_argument("--report", type=Path, help="such a file to judge, without measuring")
    parser.add_argument("--commit", default=None, help="commit to record where there is no git to ask")
    options = parser.parse_args(arguments)
    if options.report:
        points, text = report(options.report)
        print(text)
        return 1 if any(faults(points).values()) or not points else 0
    if machine.device_asked_for(options, parser, "--seqlens 16") != "cuda":
        parser.error("the memory-efficient backend needs a GPU")
    device = torch.device("cuda")
    facts, timer = machine.collect(device, options.commit), timing.make_timer(device)
    matmul = timing.matmul_tflops(timer, device, torch.bfloat16)
    speeds = (timing.copy_gbps(timer, device) * 1e3, matmul * 1e6)
    head_dims, seqlens = ([int(n) for n in text.split(",")] for text in (options.head_dims, options.seqlens))
    kinds = options.kinds.split(",") if options.kinds else None
    points = sweep(list(places(head_dims, seqlens, kinds)), timer, speeds, options.seconds)
    print(summary(points))
    if options.out:
        record = {"machine": facts, "speeds": speeds, "faults": faults(points)}
        record["points"] = [asdict(point) for point in points]
        options.out.write_text(json.dumps(record, indent=0))
    return 1 if any(faults(points).values()) or not points else 0


if __name__ == "__main__":
    sys.exit(main())
