"""Where the tensors of a case lie in memory: strides, the guards around them, and what free bytes hold.

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
from torch import Tensor

from tests.cases import Case

GUARD_BYTES = 2048  # before and after every region; 512 elements of fp32, 1024 of the 16-bit types
POISON_BYTE = 0xFF


# A view to be carved out of a region: its shape, strides and offset, in elements.
@dataclass
class View:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass
class Region:
    views: dict[str, View]
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


def place(shape: tuple[int, ...], layout: str) -> View:
    """The view of one tensor, (b, s, h, d) or (total, h, d), in a region of its own."""
    rank = len(shape)
    identity = tuple(range(rank))
    no_gaps = (0,) * rank
    if layout in ("bshd", "offset", "packed"):
        return View(shape, strides_for(shape, identity, no_gaps))
    if layout == "bhsd":
        return View(shape, strides_for(shape, identity[:-3] + (rank - 2, rank - 3, rank - 1), no_gaps))
    if layout == "sbhd":
        return View(shape, strides_for(shape, (1, 0, 2, 3) if rank == 4 else identity, no_gaps))
    if layout == "gap":
        aligned = -shape[-1] % 8 + 8
        return View(shape, strides_for(shape, identity, (0,) * (rank - 2) + (16, aligned)))
    if layout == "odd":
        return View(shape, strides_for(shape, identity, no_gaps[1:] + (1,)))
    if layout == "expanded":
        # One batch entry (dense) or one head (packed) that all the others share.
        shared = 0 if rank == 4 else 1
        base = strides_for(tuple(1 if i == shared else n for i, n in enumerate(shape)), identity, no_gaps)
        return View(shape, tuple(0 if i == shared else s for i, s in enumerate(base)))
    if layout == "singleton":
        odd = itertools.cycle((0, 3331333, 99990001))
        base = strides_for(shape, identity, no_gaps)
        return View(
            shape,
            tuple(next(odd) if n == 1 and i < rank - 1 else s for i, (n, s) in enumerate(zip(shape, base))),
        )
    raise ValueError(f"unknown layout {layout!r}")


def qkv_regions(shapes: dict[str, tuple[int, ...]], layout: str, dtype: torch.dtype) -> list[Region]:
    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    lead = 1 if layout == "offset" else 0
    if layout == "packed" and q[:-2] == k[:-2] and q[-1] == v[-1]:
        # One projection's result, split: (..., (num_heads + 2 * num_heads_k) * head_dim).
        head_dim = q[-1]
        row = (q[-2] + 2 * k[-2]) * head_dim
        outer = strides_for(q[:-2] + (row,), tuple(range(len(q) - 1)), (0,) * (len(q) - 1))[:-1]
        offsets = {"q": 0, "k": q[-2] * head_dim, "v": (q[-2] + k[-2]) * head_dim}
        return [
            Region({name: View(shapes[name], (*outer, head_dim, 1), offsets[name]) for name in "qkv"}, dtype)
        ]
    own = {name: "gap" if layout == "packed" else layout for name in "qkv"}
    if layout == "expanded":
        own["q"] = "bshd"
    return [Region({name: place(shapes[name], own[name])}, dtype, lead) for name in "qkv"]


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


def carve(regions: list[Region], device: str | torch.device) -> tuple[Tensor, dict[str, Tensor]]:
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


def write(view: Tensor, values: Tensor, tail: int) -> None:
    """Copies values into a view, once where it repeats itself; leaves the last ``tail`` rows poisoned."""
    rows = view.shape[0] - tail
    view, values = (view[:rows], values[:rows]) if tail else (view, values)
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:
            view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    view.copy_(values)


def guarded(
    values: Tensor, device: str | torch.device, strides: tuple[int, ...] | None = None, lead: int = 0
) -> tuple[Tensor, Tensor]:
    """``values`` on the device with these strides, poison before, behind and between them; and all its bytes.

    ``lead``: elements by which it is pushed off its alignment.
    """
    strides = values.contiguous().stride() if strides is None else strides
    numel = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides)) if values.numel() else 0
    size = (numel + lead) * values.dtype.itemsize
    total = (2 * GUARD_BYTES + size + 15) // 16 * 16
    buffer = torch.full((total,), POISON_BYTE, dtype=torch.uint8, device=device)
    whole = buffer[GUARD_BYTES : GUARD_BYTES + size].view(values.dtype)
    view = whole.as_strided(values.shape, strides, whole.storage_offset() + lead)
    view.copy_(values)
    return view, buffer
