"""What the fp8 kernel of csrc/sm90/fwd_fp8 computes, with the tensor cores' own sums.

Slow and literal: tiles of 128 keys, or of 64, from the last one on, maxima that are kept until a sum of
weights is too large, warps of 16 rows that then raise theirs together, and an accumulator of products that
goes to one in float32 where tiles pass a multiple of 1024 keys. Dense tensors only, and keys up to 65536,
above which the kernel works in stretches. In mixed mode scores are exact. With scores in float16
(:func:`in_half`) tiles have 128 keys, and scores, maxima and weights are rounded to float16 first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from flash_ext._cpu import fp8
from flash_ext._ops.spec import AttnSpec
from flash_ext.fp8 import Fp8Inputs
from tests.tensor_cores import BITS, add_products, products

LOG2E = 1.4426950408889634
TOP_LOG2 = 4.70043972  # log2 of 26
FEW_KEYS_LOG2 = 4.0
SUM_LIMIT = 448.0
FAR, FAR_IN_HALF = 2.0**22, 1024.0
LEAST_SCALE, LEAST_SCALE_IN_HALF, MOST_SCALE_IN_HALF = 2.0**-126, 2.0**-24, 65504.0
GROUP_ROWS, WARP_ROWS, KEYS_OF_ACCUMULATOR = 64, 16, 1024


def in_half(x: Fp8Inputs) -> bool:
    """Whether the kernel for these numbers has scores in float16."""
    return x.small and 64 < max(x.q.shape[-1], x.v.shape[-2]) <= 256


def on_cpu(x: Fp8Inputs) -> Fp8Inputs:
    tensors = {f.name: getattr(x, f.name) for f in fields(x) if f.init}
    return replace(x, **{name: t.cpu() for name, t in tensors.items() if isinstance(t, Tensor)})


@dataclass
class Rows:
    """State of the rows of a warpgroup, (h, up to 64)."""

    minus_max: Tensor
    sum: Tensor
    limit: Tensor

    @classmethod
    def new(cls, *shape: int) -> Rows:
        return cls(
            torch.full(shape, math.inf),
            torch.zeros(shape),
            torch.full(shape, SUM_LIMIT),
        )


def of_warps(flags: Tensor) -> Tensor:
    """(h, 64) flags: whether any row of the same warp has it."""
    return flags.unflatten(-1, (-1, WARP_ROWS)).any(-1, keepdim=True).expand(-1, -1, WARP_ROWS).flatten(-2)


def _is_far(minus_max: Tensor, half: bool = False) -> Tensor:
    return ~(minus_max.abs() < (FAR_IN_HALF if half else FAR))


def _power(x: Tensor) -> Tensor:
    return torch.exp2(x.float())


def _rounded_maximum(minus_max: Tensor, half: bool) -> Tensor:
    """Down to what float16 has, where it is not far."""
    if not half:
        return minus_max
    near = minus_max.half().float()
    below = torch.nextafter(near.half(), torch.full_like(near.half(), -math.inf)).float()
    return torch.where(_is_far(minus_max, True), minus_max, torch.where(near > minus_max, below, near))


def weights_of(s: Tensor, scale: Tensor, rows: Rows, first: bool, half: bool) -> tuple[Tensor, Tensor]:
    """Weights before rounding, (h, 64, keys), and what the output so far is to be multiplied by, (h, 64).

    s holds -inf where a key is hidden; ``scale`` is (h, 1).
    """
    largest = s.amax(-1)
    if first:
        seen = s[..., s.shape[-1] // 4 - 8 + torch.arange(8)] != -math.inf
        few = of_warps(~seen[..., 1::2].all(-1))
        top = torch.where(few, TOP_LOG2 - FEW_KEYS_LOG2, TOP_LOG2)
        rows.minus_max = _rounded_maximum((-largest.double() * scale + top).float(), half)
        rows.limit = torch.where(of_warps(_is_far(rows.minus_max, half)), -1.0, SUM_LIMIT)
    scale64, s64 = scale.double().unsqueeze(-1), s.double()
    # A lane has two sums of a row, of every eighth key each.
    if half:
        by = scale.clamp(min=LEAST_SCALE_IN_HALF).half().double().unsqueeze(-1)
        tried = _power((s64 * by + rows.minus_max.double().unsqueeze(-1)).half()).half().float()
        shares = torch.zeros(*tried.shape[:-1], 8)
        for of_lanes in tried.unflatten(-1, (-1, 8)).unbind(-2):
            shares = (shares + of_lanes).half().float()
    else:
        tried = _power(s64 * scale64 + rows.minus_max.double().unsqueeze(-1))
        shares = tried.unflatten(-1, (-1, 8)).sum(-2)
    bad = ~(shares <= rows.limit.unsqueeze(-1)).all(-1)
    if half:
        bad = bad | ~(scale <= MOST_SCALE_IN_HALF)
    again = of_warps(bad)
    product = -largest * scale
    lower = torch.minimum(rows.minus_max, _rounded_maximum(product + TOP_LOG2, half))
    nothing = lower == math.inf
    factor = torch.where(again & ~nothing, _power(lower - rows.minus_max), 1.0)
    offset = lower.masked_fill(nothing, 0.0).double().unsqueeze(-1)
    far, far_limit = _is_far(lower).unsqueeze(-1), of_warps(_is_far(lower, half))
    by_maximum = _power(torch.where(far, (s * scale.unsqueeze(-1)).double(), s64 * scale64) + offset)
    rows.minus_max = torch.where(again, lower, rows.minus_max)
    rows.limit = torch.where(again, torch.where(far_limit, -1.0, SUM_LIMIT), rows.limit)
    weights = torch.where(again.unsqueeze(-1), by_maximum, tried)
    rows.sum = rows.sum * factor + torch.where(again, by_maximum.sum(-1), shares.sum(-1))
    return weights, factor


def forward(x: Fp8Inputs, spec: AttnSpec, bits: int = BITS) -> tuple[Tensor, Tensor]:
    """out (b, seqlen_q, h, dv) in ``x.dtype`` and lse (b, h, seqlen_q) in float32."""
    assert x.cu_seqlens_q is None and x.k.shape[-3] <= 65536
    batch, seqlen_q, heads, _ = x.q.shape
    group = heads // x.k.shape[2]
    values = fp8.rows_of_values(x.v, x.k.shape[1], None)
    out = x.q.new_zeros(batch, seqlen_q, heads, values.shape[-1], dtype=x.dtype)
    lse = torch.full((batch, heads, seqlen_q), -math.inf)
    for b in range(batch):
        for first in range(0, seqlen_q, GROUP_ROWS):
            part = slice(first, min(first + GROUP_ROWS, seqlen_q))
            result, stat = _group(x, spec, values[b], b, first, group, bits)
            out[b, part] = result[:, : part.stop - first].transpose(0, 1).to(x.dtype)
            lse[b, :, part] = stat[:, : part.stop - first]
    if x.row_offset is not None:
        lse += spec.scale * x.row_offset
    return out, lse


def _padded(t: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[-2]))


def _group(
    x: Fp8Inputs, spec: AttnSpec, values: Tensor, b: int, first: int, group: int, bits: int
) -> tuple[Tensor, Tensor]:
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    used = min(GROUP_ROWS, seqlen_q - first)
    count = -(-used // WARP_ROWS) * WARP_ROWS  # warps without rows are left out
    half = in_half(x)
    width = 128 if half or max(x.q.shape[-1], values.shape[-1]) <= 64 else 64  # keys of a tile
    tiles, scale = -(-seqlen_k // width), spec.scale

    def per_head(t: Tensor) -> Tensor:
        return t.repeat_interleave(group, 0)

    q = _padded(x.q[b, first : first + used].float().transpose(0, 1), count)
    k = per_head(_padded(x.k[b].float().transpose(0, 1), tiles * width))
    v = per_head(_padded(values.transpose(0, 1), tiles * width))
    row = torch.arange(first, first + count)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(tiles * width)
    hidden = (key >= seqlen_k).expand(count, -1)
    if spec.window_left >= 0:
        hidden = hidden | (key < row - spec.window_left)
    if spec.window_right >= 0:
        hidden = hidden | (key > row + spec.window_right)
    sign = (scale > 0) - (scale < 0)
    # As float32 has it, from the left.
    q_scale = torch.full((q.shape[0], 1), 1.0 if scale == 0 else scale * LOG2E * sign)
    if x.q_descale is not None:
        q_scale = q_scale * x.q_descale[b, :, min(first // fp8.BLOCK, x.q_descale.shape[-1] - 1), None]
    rows = Rows.new(q.shape[0], count)
    o = total = q.new_zeros(q.shape[0], count, v.shape[-1])
    begun = False
    visible = (~hidden)[:used].any(0)
    for tile in reversed(range(tiles)):
        keys = slice(tile * width, (tile + 1) * width)
        if not visible[keys].any():
            continue
        tile_scale = q_scale
        if x.q_descale is None or x.k_descale is None:
            s = (q.double() @ k[:, keys].double().mT).float()
        else:
            k_factor = per_head(
                x.k_descale[b, :, min(keys.start // fp8.BLOCK, x.k_descale.shape[-1] - 1), None]
            )
            tile_scale = (q_scale * k_factor).clamp(min=LEAST_SCALE)
            s = products(q, k[:, keys].mT, bits, in_half=half)
        s = (s * sign).masked_fill(hidden[:, keys], -math.inf)
        weights, factor = weights_of(s, tile_scale, rows, not begun, half)
        begun = True
        o, total = o * factor.unsqueeze(-1), total * factor.unsqueeze(-1)
        o = add_products(o, weights.to(fp8.E4M3).float(), v[:, keys], bits)
        if keys.start % KEYS_OF_ACCUMULATOR == 0:
            o, total = torch.zeros_like(o), total + o
    total = total + o
    empty = (rows.minus_max == math.inf) & (rows.sum == 0)
    inverse = torch.where(empty, 0.0, 1.0 / rows.sum).unsqueeze(-1)
    result = total * inverse * per_head(x.v_descale[b]).unsqueeze(1)
    if x.v_offset is not None:
        result = result + per_head(x.v_offset[b]).unsqueeze(1)
    stat = (rows.sum.log() - rows.minus_max * math.log(2)).masked_fill(empty, -math.inf)
    return result.masked_fill(empty.unsqueeze(-1), 0.0), stat
