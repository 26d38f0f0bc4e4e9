"""FlashAttention-2's forward in Triton: what a page of Python reaches beside CUDA C++.

The skeleton that circulates in articles has five mistakes, named where this differs from it. Needs the
``triton`` package, which CUDA builds of torch bring. With ``TRITON_INTERPRET=1`` it runs on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """How a program of the grid works: its queries, its keys in a step, its warps, and key tiles on their
    way.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By head_dim, those that were tried; the first is the fastest on an H100. Shared memory holds Q and the
# stages of K and V: above 128 features, three stages of 64 keys do not fit.
TILES = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 4, 3), Tile(128, 128, 8, 2)),
    256: (Tile(128, 64, 8, 2),),
}


@triton.jit
def _step(
    acc, row_max, row_sum, q, k_rows, v_rows, stride_kn, stride_vn, scale_log2, rows, first_col, seqlen_k,
    offset, is_d,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One key block. MASKED: it crosses the diagonal or the end of the keys; others need no test at all."""
    cols = first_col + tl.arange(0, BLOCK_N)  # the block's place counts in the test, too: mistake 2
    if MASKED:
        k = tl.load(
            k_rows + cols[None, :] * stride_kn, mask=(cols[None, :] < seqlen_k) & is_d[:, None], other=0.0
        )
    else:
        k = tl.load(k_rows + cols[None, :] * stride_kn, mask=is_d[:, None], other=0.0)
    scores = tl.dot(q, k) * scale_log2
    if MASKED:
        visible = cols[None, :] < seqlen_k
        if CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None] + offset)
        scores = tl.where(visible, scores, float("-inf"))  # columns beyond the end are no zeros: mistake 3
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if MASKED:
        v = tl.load(
            v_rows + cols[:, None] * stride_vn, mask=(cols[:, None] < seqlen_k) & is_d[None, :], other=0.0
        )
    else:
        v = tl.load(v_rows + cols[:, None] * stride_vn, mask=is_d[None, :], other=0.0)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc)  # both operands of one type: mistake 4
    return acc, new_max, row_sum


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, num_heads, group, seqlen_q, seqlen_k,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    bh, m_block = pid // num_m, pid % num_m
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)  # the tile's place enters the address once: mistake 1
    cols_d = tl.arange(0, BLOCK_D)  # a power of two; HEAD_DIM need not be one: mistake 5
    is_d = cols_d < HEAD_DIM
    is_q = (rows[:, None] < seqlen_q) & is_d[None, :]
    q_at = q_ptr + b * stride_qb + h * stride_qh + rows[:, None].to(tl.int64) * stride_qm + cols_d[None, :]
    q = tl.load(q_at, mask=is_q, other=0.0)
    k_rows = k_ptr + b * stride_kb + (h // group) * stride_kh + cols_d[:, None]  # read transposed
    v_rows = v_ptr + b * stride_vb + (h // group) * stride_vh + cols_d[None, :]

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offset = seqlen_k - seqlen_q
    end = seqlen_k  # of the keys that a row of the tile sees
    whole = seqlen_k // BLOCK_N * BLOCK_N  # of the blocks that all rows see whole
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(m_block * BLOCK_M + BLOCK_M + offset, 0))
        whole = tl.minimum(whole, tl.maximum(m_block * BLOCK_M + offset + 1, 0) // BLOCK_N * BLOCK_N)
    for first_col in range(0, whole, BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, k_rows, v_rows, stride_kn, stride_vn, scale_log2, rows, first_col,
            seqlen_k, offset, is_d, CAUSAL, False, BLOCK_N,
        )  # fmt: skip
    for first_col in range(whole, end, BLOCK_N):
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q, k_rows, v_rows, stride_kn, stride_vn, scale_log2, rows, first_col,
            seqlen_k, offset, is_d, CAUSAL, True, BLOCK_N,
        )  # fmt: skip
    # Rows that see nothing are 0, and their lse is -inf.
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_at = (
        out_ptr + b * stride_ob + h * stride_oh + rows[:, None].to(tl.int64) * stride_om + cols_d[None, :]
    )
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_q)
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)))
    lse_at = lse_ptr + bh.to(tl.int64) * seqlen_q + rows
    tl.store(lse_at, lse * 0.6931471805599453, mask=rows < seqlen_q)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, forward only.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), any strides with a unit last one; head_dim up to 256.
        k, v: (batch, seqlen_k, num_heads_k, head_dim); num_heads_k divides num_heads.
        causal: aligned bottom-right.
        scale: default 1 / sqrt(head_dim); a number of the call, for which nothing is compiled anew.
        tile: default the first of TILES.

    Returns:
        out: as q. lse: (batch, num_heads, seqlen_q) float32, natural log.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim or num_heads % max(1, k.shape[2]):
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if head_dim > max(TILES):
        raise ValueError(f"head_dim must be at most {max(TILES)}, got {head_dim}")
    if any(x.stride(3) != 1 for x in (q, k, v)):
        raise ValueError("the last dimension must have stride 1")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    tile = tile or next(tiles[0] for most, tiles in TILES.items() if head_dim <= most)
    grid = (triton.cdiv(seqlen_q, tile.block_m) * batch * num_heads,)
    strides = [x.stride(i) for x in (q, k, v, out) for i in (0, 2, 1)]
    _forward[grid](
        q, k, v, out, lse, (head_dim**-0.5 if scale is None else scale) * LOG2E, *strides, num_heads,
        num_heads // k.shape[2], seqlen_q, k.shape[1], CAUSAL=causal, HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out, lse
