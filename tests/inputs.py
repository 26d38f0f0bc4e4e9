"""Turns a ``Case`` into tensors: where they lie in memory, what they hold, and the guards around them.

All inputs of a case live in one arena of 0xFF bytes, which read as NaN in every float type and as -1 in
int32. Whatever an input does not cover (the space around it, the gaps between its rows, packed rows of no
sequence) therefore poisons any computation that touches it, and one comparison of the arena with its snapshot
shows every write into an input or a guard.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch

from tests.cases import Case

GUARD_BYTES = 2048  # before and after every region; 512 elements of fp32, 1024 of the 16-bit types
POISON_BYTE = 0xFF


@dataclass
class Inputs:
    """The tensors of one case.

    q, k, v, dout: as in the contract, strides by the case's layout; tail rows of packed tensors are NaN.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, or None. dlse: lse-shaped fp32, or None.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    arena: torch.Tensor
    snapshot: torch.Tensor

    def unchanged(self) -> bool:
        """Whether every input byte and every guard byte is as it was. Synchronises."""
        return torch.equal(self.arena, self.snapshot)

    @property
    def max_seqlens(self) -> tuple[int, int]:
        """The hints to pass; zeros when the case gives none."""
        if not self.case.hints:
            return 0, 0
        return max(self.case.lens_q, default=0), max(self.case.lens_k, default=0)


# A view to be carved out of a region: its shape, strides and offset, in elements.
@dataclass
class _View:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass
class _Region:
    views: dict[str, _View]
    dtype: torch.dtype
    lead: int = 0  # elements by which the region is pushed off its 1 KB alignment
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = max(
            v.offset + 1 + sum((n - 1) * s for n, s in zip(v.shape, v.strides)) if math.prod(v.shape) else 0
            for v in self.views.values()
        )


def strides_for(shape: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose dimensions lie in memory in ``order`` (outermost first).

    ``gaps[i]`` elements are left unused after each run of dimension ``order[i]``'s inner block.
    """
    strides = [0] * len(shape)
    running = 1
    for dim, gap in zip(reversed(order), reversed(gaps)):
        strides[dim] = running
        running = running * max(shape[dim], 1) + gap
    return tuple(strides)


def _place(shape: tuple[int, ...], layout: str) -> _View:
    """The view of one tensor, (b, s, h, d) or (total, h, d), in a region of its own."""
    rank = len(shape)
    identity = tuple(range(rank))
    no_gaps = (0,) * rank
    if layout in ("bshd", "offset", "packed"):
        return _View(shape, strides_for(shape, identity, no_gaps))
    if layout == "bhsd":
        return _View(shape, strides_for(shape, identity[:-3] + (rank - 2, rank - 3, rank - 1), no_gaps))
    if layout == "sbhd":
        return _View(shape, strides_for(shape, (1, 0, 2, 3) if rank == 4 else identity, no_gaps))
    if layout == "gap":
        aligned = -shape[-1] % 8 + 8
        return _View(shape, strides_for(shape, identity, (0,) * (rank - 2) + (16, aligned)))
    if layout == "odd":
        return _View(shape, strides_for(shape, identity, no_gaps[1:] + (1,)))
    if layout == "expanded":
        # One batch entry (dense) or one head (packed) that all the others share.
        shared = 0 if rank == 4 else 1
        base = strides_for(tuple(1 if i == shared else n for i, n in enumerate(shape)), identity, no_gaps)
        return _View(shape, tuple(0 if i == shared else s for i, s in enumerate(base)))
    if layout == "singleton":
        odd = itertools.cycle((0, 3331333, 99990001))
        base = strides_for(shape, identity, no_gaps)
        return _View(
            shape,
            tuple(next(odd) if n == 1 and i < rank - 1 else s for i, (n, s) in enumerate(zip(shape, base))),
        )
    raise ValueError(f"unknown layout {layout!r}")


def _qkv_regions(shapes: dict[str, tuple[int, ...]], layout: str, dtype: torch.dtype) -> list[_Region]:
    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    lead = 1 if layout == "offset" else 0
    if layout == "packed" and q[:-2] == k[:-2] and q[-1] == v[-1]:
        # One projection's result, split: (..., (num_heads + 2 * num_heads_k) * head_dim).
        head_dim = q[-1]
        row = (q[-2] + 2 * k[-2]) * head_dim
        outer = strides_for(q[:-2] + (row,), tuple(range(len(q) - 1)), (0,) * (len(q) - 1))[:-1]
        offsets = {"q": 0, "k": q[-2] * head_dim, "v": (q[-2] + k[-2]) * head_dim}
        return [
            _Region(
                {name: _View(shapes[name], (*outer, head_dim, 1), offsets[name]) for name in "qkv"}, dtype
            )
        ]
    own = {name: "gap" if layout == "packed" else layout for name in "qkv"}
    if layout == "expanded":
        own["q"] = "bshd"
    return [_Region({name: _place(shapes[name], own[name])}, dtype, lead) for name in "qkv"]


def tensor_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v, out and lse of a case."""
    if case.is_packed:
        total_q, total_k = sum(case.lens_q) + case.tail, sum(case.lens_k) + case.tail
        rows_q, rows_k, lse = (total_q,), (total_k,), (case.num_heads, total_q)
    else:
        rows_q, rows_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
        lse = (case.batch, case.num_heads, case.seqlen_q)
    return {
        "q": (*rows_q, case.num_heads, case.head_dim),
        "k": (*rows_k, case.num_heads_k, case.head_dim),
        "v": (*rows_k, case.num_heads_k, case.dim_v),
        "out": (*rows_q, case.num_heads, case.dim_v),
        "lse": lse,
    }


def make_inputs(case: Case, device: str | torch.device) -> Inputs:
    """The tensors of ``case`` on ``device``; the same case and kind of device give the same values."""
    shapes = tensor_shapes(case)
    regions = _qkv_regions(shapes, case.layout, case.torch_dtype)
    dout_layout = case.dout_layout if case.layout != "offset" else "offset"
    regions.append(
        _Region({"dout": _place(shapes["out"], dout_layout)}, case.torch_dtype, int(dout_layout == "offset"))
    )
    if case.dlse:
        lse_dtype = torch.float64 if case.dtype == "fp64" else torch.float32
        regions.append(_Region({"dlse": _place(shapes["lse"], "bshd")}, lse_dtype))
    if case.is_packed:
        for name, lens in (("cu_seqlens_q", case.lens_q), ("cu_seqlens_k", case.lens_k)):
            regions.append(_Region({name: _View((len(lens) + 1,), (1,))}, torch.int32))

    arena, views = _carve(regions, device)
    generator = torch.Generator(device).manual_seed(case.seed)
    values = _values(case, shapes, device, generator)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in views:
            lens = case.lens_q if name.endswith("q") else case.lens_k
            values[name] = torch.tensor(list(itertools.accumulate(lens, initial=0)), dtype=torch.int32)
    for name, view in views.items():
        _write(view, values[name], case.tail if name in ("q", "k", "v", "dout") else 0)
    inputs = {
        name: views.get(name) for name in ("q", "k", "v", "dout", "dlse", "cu_seqlens_q", "cu_seqlens_k")
    }
    return Inputs(case=case, arena=arena, snapshot=arena.clone(), **inputs)


def _carve(
    regions: list[_Region], device: str | torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    starts, cursor = [], GUARD_BYTES
    for region in regions:
        starts.append(cursor)
        size = (region.numel + region.lead) * region.dtype.itemsize
        cursor += (size + GUARD_BYTES + 1023) // 1024 * 1024
    arena = torch.full((cursor,), POISON_BYTE, dtype=torch.uint8, device=device)
    views = {}
    for region, start in zip(regions, starts):
        whole = arena[start : start + (region.numel + region.lead) * region.dtype.itemsize].view(region.dtype)
        for name, view in region.views.items():
            views[name] = whole.as_strided(
                view.shape, view.strides, whole.storage_offset() + region.lead + view.offset
            )
    return arena, views


def _write(view: torch.Tensor, values: torch.Tensor, tail: int) -> None:
    """Copies values into a view, once where it repeats itself; leaves the last ``tail`` rows poisoned."""
    rows = view.shape[0] - tail
    view, values = (view[:rows], values[:rows]) if tail else (view, values)
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    view.copy_(values)


def _positions(lens: tuple[int, ...], total: int) -> torch.Tensor:
    """Relative position of each packed row in its sequence, 0..1."""
    parts = [torch.linspace(0, 1, n) if n > 1 else torch.zeros(n) for n in lens]
    parts.append(torch.zeros(total - sum(lens)))
    return torch.cat(parts)


def _values(
    case: Case, shapes: dict[str, tuple[int, ...]], device: str | torch.device, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """What the tensors hold, by ``case.data``, in fp32 (fp64 for fp64 cases)."""
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    def uniform(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, device=device, dtype=dtype, generator=generator)

    values = {name: normal(shapes[name]) for name in ("q", "k", "v")}
    values["dout"] = normal(shapes["out"])
    if case.dlse:
        values["dlse"] = normal(shapes["lse"])
    q, k, v = values["q"], values["k"], values["v"]
    if case.data == "outlier":  # activations of real models: one entry in a thousand is ten times larger
        for name in ("q", "k", "v"):
            values[name] += 10 * normal(shapes[name]) * (uniform(shapes[name]) < 1e-3)
    elif case.data == "large":
        for tensor in (q, k, v):
            tensor *= 3
    elif case.data == "biased":  # rounding errors of P no longer average out against a zero-mean V
        v += 2
    elif case.data in (
        "rising",
        "falling",
    ):  # the running maximum moves in every tile, or in the first one only
        ramp = _positions(case.lens_k, k.shape[0]) if case.is_packed else torch.linspace(0, 1, k.shape[1])
        ramp = (ramp if case.data == "rising" else 1 - ramp).to(device, dtype)[:, None, None]
        values["q"] = 0.3 * q + 1
        values["k"] = 0.3 * k + 30 / math.sqrt(case.head_dim) * ramp
    elif case.data == "peaked":
        q *= 6
    elif (
        case.data == "twins"
    ):  # several keys share the maximum exactly, so their P is exactly 1 before scaling
        direction = normal((case.head_dim,))
        values["q"] = 0.1 * q + direction
        k[..., ::2, :, :] = 3 * direction
        v -= 2
    elif case.data == "integer":  # small whole numbers, most of them zero: products and sums are exact
        for name, tensor in values.items():
            if name != "dlse":
                keep = uniform(tensor.shape) < 0.2
                values[name] = torch.where(keep, (tensor * 1.5).round().clamp(-2, 2), 0)
    elif case.data == "zero_q":  # every visible key weighs the same: lse is the logarithm of their count
        q.zero_()
    elif case.data == "tiny":  # subnormal V in fp16, far below the normal range of P in bf16
        v *= 2.0 ** (-20 if case.dtype == "fp16" else -100)
    elif case.data == "nan_row":
        special_row(q, case, 0)[:] = float("nan")
    elif case.data == "inf_value":
        special_row(v, case, 1)[:1] = float("inf")
    elif case.data != "normal":
        raise ValueError(f"unknown data kind {case.data!r}")
    return values


def special_row(tensor: torch.Tensor, case: Case, side: int) -> torch.Tensor:
    """The (head_dim,) view where a special value is planted: head 0, middle row of the first sequence.

    ``side`` is 0 for a tensor of query rows, 1 for one of key rows. Empty when that sequence has no rows.
    """
    length = next(iter(case.sequences()), (0, 0))[side]
    if length == 0:
        return tensor.new_empty(0)
    return (tensor if case.is_packed else tensor[0])[length // 2, 0]
