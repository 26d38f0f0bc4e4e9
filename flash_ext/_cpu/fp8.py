"""fp8 attention on the CPU: quantisation, and a forward that rounds what the kernels round.

It rounds weights below the true maximum of a row, and sums in float32. The kernels may have a lower maximum,
and add up to 8 tiles of 128 keys in an accumulator of some 14 bits.

Numbers are e4m3 (float8_e4m3fn) times float32 factors. v is transposed: (b, h_k, dv, keys), with the keys of
each sequence from a multiple of 16 on, in groups of 16 in the order :data:`KEY_ORDER`, and zeros behind the
last one. Packed tensors lack the b. csrc/fp8.h has the same layout, csrc/passes/fp8_passes.cuh the same
rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._ops.spec import AttnSpec
from .rotary import turned

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # rows that share a factor
GROUP = 16
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
LARGEST = 448.0
SMALL = 15.0  # of q and k: a product of two rows of 256 columns fits float16, which some kernels add it in
LEAST_AMAX = 1e-30  # what is smaller counts as 0, whose factor is 1
TOP_WEIGHT = 26.0  # of the largest score of a row
SIGNS_OF_EIGHT = 0x9E3779B1


def transposed_columns(keys: int, batch: int, packed: bool) -> int:
    return (keys // GROUP + batch) * GROUP if packed else -(-keys // GROUP) * GROUP


def num_blocks(rows: int, batch: int, packed: bool) -> int:
    return rows // BLOCK + batch if packed else -(-rows // BLOCK)


# ---- where rows are --------------------------------------------------------------------------------------


def _sequences(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed row, and where that begins; nothing is read on the host."""
    row = torch.arange(rows, device=cu_seqlens.device)
    bounds = cu_seqlens.long()
    of_row = torch.searchsorted(bounds[1:].contiguous(), row, right=True).clamp(max=len(bounds) - 2)
    return of_row, bounds[of_row]


def block_of_rows(rows: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Which factor each row has."""
    if cu_seqlens is None:
        return torch.arange(rows, device=device) // BLOCK
    sequence, start = _sequences(cu_seqlens, rows)
    inside = (torch.arange(rows, device=device) - start).clamp(min=0)
    return (start // BLOCK + sequence + inside // BLOCK).clamp(
        0, num_blocks(rows, len(cu_seqlens) - 1, True) - 1
    )


def factors_of_blocks(of_sequences: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """(h, blocks) from the factors (sequences, h) of packed rows."""
    batch, heads = of_sequences.shape
    factors = of_sequences.new_ones(heads, num_blocks(rows, batch, True))
    sequence, _ = _sequences(cu_seqlens, rows)
    return factors.index_copy_(
        1, block_of_rows(rows, cu_seqlens, of_sequences.device), of_sequences.t().index_select(1, sequence)
    )


def column_of_rows(rows: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Which column of a transposed v each key has."""
    key = torch.arange(rows, device=device)
    first = torch.zeros_like(key)
    if cu_seqlens is not None:
        sequence, start = _sequences(cu_seqlens, rows)
        first = (start // GROUP + sequence) * GROUP
        key = (key - start).clamp(min=0)
    place = torch.tensor(KEY_ORDER, device=device).argsort()
    return first + key // GROUP * GROUP + place[key % GROUP]


def used_rows(rows: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> Tensor | None:
    """Which rows are among the first ``seqused`` of their sequence, (b, rows), packed (rows,); None: all."""
    if seqused is None or seqused.numel() == 0:
        return None
    row = torch.arange(rows, device=seqused.device)
    if cu_seqlens is None:
        return row < seqused[:, None]
    sequence, start = _sequences(cu_seqlens, rows)
    return row - start < seqused[sequence]


def without_unused(x: Tensor, used: Tensor | None) -> Tensor:
    """Zeros in the rows that are not used, whatever they hold."""
    return x if used is None else x.where(used[..., None, None], 0)


def transpose_values(v: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None = None) -> Tensor:
    """e4m3 (b, keys, h_k, dv) to (b, h_k, dv, columns), packed (keys, h_k, dv) to (h_k, dv, columns).

    Keys from ``seqused`` on become zeros.
    """
    keys, batch = v.shape[-3], 0 if cu_seqlens is None else len(cu_seqlens) - 1
    columns = transposed_columns(keys, batch, cu_seqlens is not None)
    place = column_of_rows(keys, cu_seqlens, v.device)
    if cu_seqlens is not None:  # one more column takes the rows of no sequence
        place = torch.where(_inside(cu_seqlens, keys), place, columns)
    rows = v.new_zeros((*v.shape[:-3], columns + 1, *v.shape[-2:]), dtype=torch.uint8)
    used = used_rows(keys, cu_seqlens, seqused)
    rows.index_copy_(-3, place, without_unused(v.view(torch.uint8), used))
    return rows.narrow(-3, 0, columns).movedim(-3, -1).contiguous().view(E4M3)


def _inside(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Whether a packed row belongs to a sequence."""
    row = torch.arange(rows, device=cu_seqlens.device)
    return (row >= cu_seqlens[0]) & (row < cu_seqlens[-1])


def rows_of_values(v: Tensor, keys: int, cu_seqlens: Tensor | None) -> Tensor:
    """The inverse of :func:`transpose_values`, as float32."""
    columns = column_of_rows(keys, cu_seqlens, v.device)
    return v.float().index_select(-1, columns).movedim(-1, -3)


def _sign(column: int) -> int:
    of_eight = (column // 8 * 8 * SIGNS_OF_EIGHT) % 2**32 >> 24
    return of_eight >> column % 8 & 1


def rotate(x: Tensor) -> Tensor:
    """Random signs, then the Walsh-Hadamard transform of the last dimension: orthogonal."""
    d = x.shape[-1]
    bits = torch.tensor([_sign(column) for column in range(d)], device=x.device)
    y = x * (1 - 2 * bits).to(x.dtype)
    step = 1
    while step < d:
        pairs = y.unflatten(-1, (d // (2 * step), 2, step))
        low, high = pairs.unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    rotated: Tensor = y * d**-0.5
    return rotated


# ---- quantisation ----------------------------------------------------------------------------------------


def _factor(amax: Tensor, largest: float = LARGEST) -> Tensor:
    return torch.where(amax < LEAST_AMAX, 1.0, amax / largest)


def _rounded(x: Tensor) -> Tensor:
    """To e4m3; what is beyond 448 stays there, and NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def _known(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The rows of sequences, (b, rows, h, d)."""
    if cu_seqlens is None:
        return x.float()
    return x[int(cu_seqlens[0]) : int(cu_seqlens[-1])].float().unsqueeze(0)


def _known_used(used: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """(b, rows): which of these rows are used; None: all."""
    if used is None or cu_seqlens is None:
        return used
    return used[int(cu_seqlens[0]) : int(cu_seqlens[-1])].unsqueeze(0)


def _amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """0 of nothing; NaN does not count."""
    x = x.abs().nan_to_num(nan=0.0, posinf=math.inf)
    for dim in dims:
        x = x.amax(dim, keepdim=True) if x.shape[dim] > 0 else x.sum(dim, keepdim=True)
    return x


def _mean(x: Tensor, used: Tensor | None) -> Tensor:
    """(b, rows, h, d), zeros where rows are not used, to (b, h, d); 0 of no rows."""
    if used is None:
        return x.sum(1) / max(1, x.shape[1])
    return x.sum(1) / used.sum(-1).clamp(min=1)[:, None, None]


def _quantize_rows(
    x: Tensor,
    offset: Tensor | None,
    cu_seqlens: Tensor | None,
    used: Tensor | None,
    by_block: bool,
    hadamard: bool,
) -> tuple[Tensor, Tensor]:
    """q or k, (b, rows, h, d) or (rows, h, d), with factors (b, h, n) or (h, n)."""
    y = x.float()
    if offset is not None:
        y = y - (offset if cu_seqlens is not None else offset.unsqueeze(1))
    y = without_unused(y, used)
    if hadamard:
        y = rotate(y)
    per_row = _amax(y, (-1,)).squeeze(-1).transpose(-1, -2)  # (b, h, rows)
    if not by_block:
        known = per_row
        if cu_seqlens is not None:
            known = per_row[..., int(cu_seqlens[0]) : int(cu_seqlens[-1])]
        amax = _amax(known, (-1,))
        index = torch.zeros(x.shape[-3], dtype=torch.long)
    else:
        index = block_of_rows(x.shape[-3], cu_seqlens, x.device)
        if cu_seqlens is not None:
            per_row = per_row * _inside(cu_seqlens, x.shape[-3])
        n = num_blocks(x.shape[-3], 0 if cu_seqlens is None else len(cu_seqlens) - 1, cu_seqlens is not None)
        amax = per_row.new_zeros((*per_row.shape[:-1], n))
        amax.scatter_reduce_(-1, index.expand_as(per_row), per_row, "amax")
    factor = _factor(amax, SMALL)
    of_rows = (1.0 / factor).index_select(-1, index).transpose(-1, -2).unsqueeze(-1)
    numbers = _rounded(y * of_rows)
    if cu_seqlens is not None:
        keep = _inside(cu_seqlens, x.shape[-3])[:, None, None]
        numbers = (numbers.view(torch.uint8) * keep).view(E4M3)
    return numbers.contiguous(), factor.contiguous()


def _turned(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    if cos is None and sin is None:
        return x
    if cos is None or sin is None or cos.shape != sin.shape or cos.shape[-2] != x.shape[-3]:
        raise ValueError("cos and sin must be given together, a row for each row that they turn.")
    return turned(x.float(), cos.float().unsqueeze(-2), sin.float().unsqueeze(-2), interleaved)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    by_block: bool,
    smooth_k: bool,
    smooth_v: bool,
    hadamard: bool,
    mixed: bool,
    cos_q: Tensor | None = None,
    sin_q: Tensor | None = None,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, ...]:
    """``flash_ext::quantize_fp8``: q, k, v, their factors, and the offsets of v, of k and of scores.

    Keys from ``seqused_k`` on count nowhere, and become zeros.
    """
    if mixed and (cos_q is not None or cos_k is not None):
        raise ValueError("mixed mode hands q and k back as they are: turn them before.")
    q, k = _turned(q, cos_q, sin_q, interleaved), _turned(k, cos_k, sin_k, interleaved)
    used = used_rows(k.shape[-3], cu_seqlens_k, seqused_k)
    known_used = _known_used(used, cu_seqlens_k)
    k, v = without_unused(k, used), without_unused(v, used)
    nothing = q.new_empty(0, dtype=torch.float32)
    q8 = k8 = q.new_empty(0, dtype=E4M3)
    q_factor = k_factor = k_offset = row_offset = v_offset = nothing

    def packed_or_not(x: Tensor) -> Tensor:
        return x if cu_seqlens_k is None else x.squeeze(0)

    if not mixed:
        if smooth_k:
            k_offset = packed_or_not(_mean(_known(k, cu_seqlens_k), known_used))
        q8, q_factor = _quantize_rows(q, None, cu_seqlens_q, None, by_block, hadamard)
        shift = k_offset if smooth_k else None
        k8, k_factor = _quantize_rows(k, shift, cu_seqlens_k, used, by_block, hadamard)
        if smooth_k:
            shared = rotate(k_offset) if hadamard else k_offset
            shared = shared.repeat_interleave(q.shape[-2] // k.shape[-2], -2)  # (b, h, d)
            numbers = dequantize_rows(q8, q_factor, cu_seqlens_q)
            dots = numbers * (shared if cu_seqlens_q is not None else shared.unsqueeze(1))
            row_offset = dots.sum(-1).transpose(-1, -2).contiguous()
    known = _known(v, cu_seqlens_k)
    mean = _mean(known, known_used) if smooth_v else known.new_zeros(known.shape[0], *known.shape[2:])
    amax = _amax(without_unused(known - mean.unsqueeze(1), known_used), (1,)).squeeze(1)
    factor = _factor(amax)
    shift, inverse = packed_or_not(mean), packed_or_not(1.0 / factor)
    if cu_seqlens_k is None:
        shift, inverse = shift.unsqueeze(1), inverse.unsqueeze(1)
    scaled = (v.float() - shift) * inverse
    numbers = _rounded(scaled)
    if smooth_v:
        lost = without_unused(scaled - numbers.float(), used)
        v_offset = packed_or_not(mean + _mean(_known(lost, cu_seqlens_k), known_used) * factor)
    v8 = transpose_values(numbers, cu_seqlens_k, seqused_k)
    return q8, k8, v8, q_factor, k_factor, packed_or_not(factor), v_offset, k_offset, row_offset


def dequantize_rows(x: Tensor, factor: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """q or k in float32."""
    if factor.shape[-1] == 1:
        of_rows = factor.transpose(-1, -2)
    else:
        of_rows = factor.index_select(-1, block_of_rows(x.shape[-3], cu_seqlens, x.device)).transpose(-1, -2)
    return x.float() * of_rows.unsqueeze(-1)


# ---- the forward -----------------------------------------------------------------------------------------


def _pieces(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
) -> Iterator[tuple[int, slice, slice]]:
    """Batch entry, rows and keys of each sequence."""
    used = None if seqused_k is None else seqused_k.tolist()
    if cu_seqlens_q is None or cu_seqlens_k is None:
        for b in range(q.shape[0]):
            yield b, slice(0, q.shape[1]), slice(0, k.shape[1] if used is None else used[b])
        return
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        end = bounds_k[b + 1] if used is None else bounds_k[b] + used[b]
        yield 0, slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], end)


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_factor: Tensor | None,
    k_factor: Tensor | None,
    v_factor: Tensor,
    v_offset: Tensor | None,
    row_offset: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    sinks: Tensor | None,
    spec: AttnSpec,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """``flash_ext::fwd_fp8``: out in ``dtype``, lse and the largest score of each row in float32.

    Weights are rounded to e4m3 with the largest of a row at 26, as the kernels have them where a row's
    maximum comes first; row sums are of weights before rounding. lse, largest scores and the sinks beside
    them are those of scores to which ``row_offset`` has come back.
    """
    packed = cu_seqlens_q is not None
    if q_factor is not None and k_factor is not None:
        q, k = dequantize_rows(q, q_factor, cu_seqlens_q), dequantize_rows(k, k_factor, cu_seqlens_k)
    values = rows_of_values(v, k.shape[-3], cu_seqlens_k)
    q, k, values, v_factor = (x.unsqueeze(0) if packed else x for x in (q, k, values, v_factor))
    if v_offset is not None and packed:
        v_offset = v_offset.unsqueeze(0)
    group = q.shape[2] // k.shape[2]
    out = q.new_zeros((*q.shape[:3], values.shape[-1]), dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
    row_max = lse.clone()
    offsets = torch.zeros_like(lse)
    if row_offset is not None:
        offsets = spec.scale * (row_offset.unsqueeze(0) if packed else row_offset)
    for b, rows, keys in _pieces(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k):
        keys_t = k[b, keys].float().permute(1, 2, 0).repeat_interleave(group, 0)  # (h, d, keys)
        values_h = values[b, keys].transpose(0, 1).repeat_interleave(group, 0)  # (h, keys, dv)
        shift = (keys.stop - keys.start) - (rows.stop - rows.start)
        for first in range(rows.start, rows.stop, BLOCK):
            part = slice(first, min(first + BLOCK, rows.stop))
            scores = q[b, part].float().transpose(0, 1) @ keys_t * spec.scale
            at = torch.arange(part.start, part.stop)[:, None] - rows.start + shift
            key = torch.arange(keys.stop - keys.start)
            hidden = torch.zeros(len(at), len(key), dtype=torch.bool)
            if spec.window_left >= 0:
                hidden |= key < at - spec.window_left
            if spec.window_right >= 0:
                hidden |= key > at + spec.window_right
            scores.masked_fill_(hidden, -math.inf)
            largest = (
                scores.amax(-1, keepdim=True)
                if len(key)
                else scores.new_full((*scores.shape[:2], 1), -math.inf)
            )
            empty = largest == -math.inf
            weights = TOP_WEIGHT * torch.exp(scores - largest.masked_fill(empty, 0.0))
            total = weights.sum(-1, keepdim=True)
            result = weights.to(E4M3).float() @ values_h / total.masked_fill(empty, 1.0)
            result = result * v_factor[b].repeat_interleave(group, 0).unsqueeze(1)
            if v_offset is not None:
                result = result + v_offset[b].repeat_interleave(group, 0).unsqueeze(1)
            offset = offsets[b, :, part].unsqueeze(-1)
            stat = (largest + torch.log(total / TOP_WEIGHT) + offset).masked_fill(empty, -math.inf)
            result = result.masked_fill(empty, 0.0)
            if sinks is not None:
                sink = sinks[:, None, None]
                # A sink of -inf is none: beside a row without keys sigmoid would see -inf - -inf.
                result = result * torch.sigmoid(stat - sink).masked_fill(sink == -math.inf, 1.0)
                stat = torch.logaddexp(stat, sink)
            out[b, part] = result.transpose(0, 1).to(dtype)
            lse[b, :, part] = stat.squeeze(-1)
            row_max[b, :, part] = (largest + offset).masked_fill(empty, -math.inf).squeeze(-1)
    if packed:
        out, lse, row_max = out.squeeze(0), lse.squeeze(0), row_max.squeeze(0)
    return out, lse, row_max
