"""The steps from softmax to FlashAttention-2, one small function each, counting what crosses the memory
border.

For reading, testing and the demo; nothing in the library runs on it. The order is that of the literature:

1. softmax in three passes, in two, and in blocks that are merged;
2. attention with the score matrix in memory (Algorithm 0 of Dao et al. 2022);
3. FlashAttention (Algorithm 1 there): key blocks outside, query blocks inside, running results in memory;
4. the same update with the loops exchanged, as one program per query block of a one-dimensional grid;
5. FlashAttention-2 (Algorithm 1 of Dao 2023): unnormalised accumulator, one division, logsumexp out.

Articles that teach these carry mistakes: unguarded blocks without a visible key, an epsilon in the
denominator, statistics in half precision, a padding mask spread over the wrong dimension, unmasked tail
columns, exchanged block sizes. What stands here is free of them, and ``tests/examples/test_ladder.py``
holds each one to it.

Sources: Milakov and Gimelshein 2018 (https://arxiv.org/abs/1805.02867) for the two-pass softmax, Dao et al.
2022 (https://arxiv.org/abs/2205.14135), Dao 2023 (https://arxiv.org/abs/2307.08691).

Memory is counted in elements, as in the papers' theorems. q is (seqlen_q, head_dim), k and v are
(seqlen_k, head_dim), unless said otherwise. Arithmetic is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


@dataclass
class Memory:
    """The large slow memory (HBM). Algorithms work on what they loaded; every element that moves is
    counted."""

    read: int = 0
    written: int = 0

    @property
    def accesses(self) -> int:
        """Elements read and written."""
        return self.read + self.written

    def load(self, array: Tensor, *index: slice | int) -> Tensor:
        """A copy of ``array[index]`` on chip."""
        block = array[index].clone()
        self.read += block.numel()
        return block

    def store(self, block: Tensor, array: Tensor, *index: slice | int) -> None:
        """``array[index] = block``, converted to the array's dtype."""
        array[index] = block
        self.written += block.numel()

    def allocate(self, *shape: int, value: float, like: Tensor) -> Tensor:
        """A new array of ``value`` in the accumulation dtype of ``like``; filling it counts as writing it."""
        array = torch.full(shape, value, dtype=accumulation_dtype(like), device=like.device)
        self.written += array.numel()
        return array


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Sums, maxima and running outputs are never kept in half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def blocks(length: int, size: int) -> list[slice]:
    """``length`` cut into ceil(length / size) ranges; the last one may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


# -----------------------------------------------------------------------------------------------------------
# Softmax


def softmax_3pass(x: Tensor, memory: Memory | None = None) -> Tensor:
    """Safe softmax of a vector as it is defined: one pass for the maximum, one for the sum, one for the
    result.

    With x in memory that is too large to keep, each pass reads it again: 3 n reads, n writes.
    """
    memory = memory or Memory()
    out = torch.empty_like(x)
    row_max = NEG_INF
    for i in range(len(x)):
        row_max = max(row_max, float(memory.load(x, i)))
    row_sum = 0.0
    for i in range(len(x)):
        row_sum += math.exp(float(memory.load(x, i)) - row_max)
    for i in range(len(x)):
        memory.store(x.new_tensor(math.exp(float(memory.load(x, i)) - row_max) / row_sum), out, i)
    return out


def softmax_2pass(x: Tensor, memory: Memory | None = None) -> Tensor:
    """Safe softmax of a vector with maximum and sum found together: 2 n reads, n writes.

    When a larger maximum appears the sum so far is rescaled by exp(old maximum - new maximum).
    """
    memory = memory or Memory()
    out = torch.empty_like(x)
    row_max, row_sum = NEG_INF, 0.0
    for i in range(len(x)):
        value = float(memory.load(x, i))
        new_max = max(row_max, value)
        row_sum = row_sum * math.exp(row_max - new_max) + math.exp(value - new_max)
        row_max = new_max
    for i in range(len(x)):
        memory.store(x.new_tensor(math.exp(float(memory.load(x, i)) - row_max) / row_sum), out, i)
    return out


@dataclass(frozen=True)
class SoftmaxStats:
    """What a block of a row must keep so that the softmax of the whole row can still be formed.

    row_max and row_sum are single numbers per row (0-d tensors), exps has one element per entry of the block.
    """

    row_max: Tensor
    exps: Tensor
    row_sum: Tensor

    def softmax(self) -> Tensor:
        """Softmax of the entries seen so far."""
        return self.exps / self.row_sum


def block_softmax(x: Tensor) -> SoftmaxStats:
    """Statistics of one block of a row. The empty block has maximum -inf and sum 0 and merges as the
    identity."""
    if x.numel() == 0:
        return SoftmaxStats(x.new_tensor(NEG_INF), x, x.new_tensor(0.0))
    row_max = x.max()
    exps = torch.exp(x - finite_shift(row_max))
    return SoftmaxStats(row_max, exps, exps.sum())


def merge_softmax(a: SoftmaxStats, b: SoftmaxStats) -> SoftmaxStats:
    """Statistics of two blocks, of any sizes, put one after the other."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = finite_shift(row_max)
    rescale_a, rescale_b = torch.exp(a.row_max - shift), torch.exp(b.row_max - shift)
    exps = torch.cat([rescale_a * a.exps, rescale_b * b.exps])
    return SoftmaxStats(row_max, exps, rescale_a * a.row_sum + rescale_b * b.row_sum)


def finite_shift(row_max: Tensor) -> Tensor:
    """What to subtract before exp: the maximum, or 0 where nothing was visible and -inf - -inf would be
    NaN."""
    return row_max.masked_fill(row_max == NEG_INF, 0.0)


# -----------------------------------------------------------------------------------------------------------
# Attention


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, mask: Tensor | None = None,
    memory: Memory | None = None,
) -> Tensor:  # fmt: skip
    """Algorithm 0: scores and weights go to memory and come back. O(N d + N^2) accesses.

    ``mask`` (seqlen_q, seqlen_k) bool is True where a key is visible, here and below; it is not counted.
    """
    memory = memory or Memory()
    dtype = accumulation_dtype(q)
    scores, weights = (torch.empty(len(q), len(k), dtype=dtype) for _ in range(2))
    out = torch.empty(len(q), v.shape[1], dtype=dtype)

    product = memory.load(q).to(dtype) @ memory.load(k).to(dtype).T * scale
    memory.store(product if mask is None else product.masked_fill(~mask, NEG_INF), scores)

    scores_on_chip = memory.load(scores)
    exps = torch.exp(scores_on_chip - finite_shift(row_maximum(scores_on_chip)))
    memory.store(normalise(exps, exps.sum(dim=1, keepdim=True)), weights)

    memory.store(memory.load(weights) @ memory.load(v).to(dtype), out)
    return out.to(q.dtype)


def row_maximum(scores: Tensor) -> Tensor:
    """(rows, 1); -inf for rows without columns."""
    return scores.amax(dim=1, keepdim=True) if scores.shape[1] else scores.new_full((len(scores), 1), NEG_INF)


def normalise(x: Tensor, row_sum: Tensor) -> Tensor:
    """diag(row_sum)^-1 x, that is each row divided by its own sum; rows that saw nothing become 0."""
    return torch.where(row_sum == 0, 0.0, x / row_sum)


class BlockSizes(NamedTuple):
    """Rows of Q and O, and rows of K and V, that are on chip at a time (B_r and B_c in the papers)."""

    block_m: int
    block_n: int


def block_sizes(sram: int, head_dim: int) -> BlockSizes:
    """Block sizes of FlashAttention for ``sram`` elements of fast memory.

    B_c = ceil(M / 4d): a quarter each for K, V, Q and O. B_r is that too, but at most d, so that the scores
    B_r x B_c take no more than B_c x d does. (Some articles exchange the two.)
    """
    block_n = -(-sram // (4 * head_dim))
    return BlockSizes(min(block_n, head_dim), block_n)


def sram_use(sizes: BlockSizes, head_dim: int) -> dict[str, int]:
    """Elements of fast memory that the blocks of one step take; statistics live in registers."""
    return {
        "k, v": 2 * sizes.block_n * head_dim,
        "q, o": 2 * sizes.block_m * head_dim,
        "scores": sizes.block_m * sizes.block_n,
    }


@dataclass(frozen=True)
class Step:
    """What :func:`flash_attention_1` and :func:`flash_attention_2` show an observer after each tile.

    m_block, n_block: which tile, from 0. row_max and row_sum: (rows, 1). out: (rows, head_dim_v), normalised,
    so it is the attention of these rows over the first n_block + 1 key blocks.
    """

    m_block: int
    n_block: int
    row_max: Tensor
    row_sum: Tensor
    out: Tensor


Observer = Callable[[Step], None]


def flash_attention_1(
    q: Tensor, k: Tensor, v: Tensor, sizes: BlockSizes, scale: float = 1.0, mask: Tensor | None = None,
    memory: Memory | None = None, observe: Observer | None = None,
) -> Tensor:  # fmt: skip
    """FlashAttention: key blocks outside, query blocks inside, output and statistics in memory between steps.

    K and V are read once, Q and O once per key block: Theta(N^2 d^2 / M) accesses. Numbered comments are the
    lines of the paper's Algorithm 1.
    """
    memory = memory or Memory()
    dtype = accumulation_dtype(q)
    out = memory.allocate(len(q), v.shape[1], value=0.0, like=q)  # 2
    row_sum = memory.allocate(len(q), 1, value=0.0, like=q)
    row_max = memory.allocate(len(q), 1, value=NEG_INF, like=q)

    for n_block, cols in enumerate(blocks(len(k), sizes.block_n)):  # 5
        k_j, v_j = memory.load(k, cols).to(dtype), memory.load(v, cols).to(dtype)  # 6
        for m_block, rows in enumerate(blocks(len(q), sizes.block_m)):  # 7
            q_i = memory.load(q, rows).to(dtype)  # 8
            out_i = memory.load(out, rows)
            sum_i, max_i = memory.load(row_sum, rows), memory.load(row_max, rows)
            scores = q_i @ k_j.T * scale  # 9
            if mask is not None:
                scores = scores.masked_fill(~mask[rows, cols], NEG_INF)
            max_ij = row_maximum(scores)  # 10
            exps = torch.exp(scores - finite_shift(max_ij))
            sum_ij = exps.sum(dim=1, keepdim=True)
            new_max = torch.maximum(max_i, max_ij)  # 11
            shift = finite_shift(new_max)
            old_part = torch.exp(max_i - shift) * sum_i
            new_part = torch.exp(max_ij - shift)
            new_sum = old_part + new_part * sum_ij
            new_out = normalise(old_part * out_i + new_part * (exps @ v_j), new_sum)  # 12
            memory.store(new_out, out, rows)
            memory.store(new_sum, row_sum, rows)  # 13
            memory.store(new_max, row_max, rows)
            if observe is not None:
                observe(Step(m_block, n_block, new_max, new_sum, new_out))
    return out.to(q.dtype)


def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, sizes: BlockSizes, scale: float = 1.0, causal: bool = False,
    memory: Memory | None = None, observe: Observer | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2: query blocks outside, so that the running results never leave the chip.

    The accumulator stays unnormalised, which saves a division of the whole block per step, and one number per
    row is kept for the backward pass instead of two. ``causal`` is aligned bottom-right; tiles that hide
    everything are skipped and only tiles that hide something are masked.

    Returns:
        out: dtype of q. lse: (seqlen_q,) row_max + log(row_sum), accumulation dtype, -inf for rows without
            keys.
    """
    memory = memory or Memory()
    dtype = accumulation_dtype(q)
    out = torch.empty(len(q), v.shape[1], dtype=q.dtype)
    lse = torch.empty(len(q), dtype=dtype)

    for m_block, rows in enumerate(blocks(len(q), sizes.block_m)):
        q_i = memory.load(q, rows).to(dtype)
        acc = q_i.new_zeros(len(q_i), v.shape[1])
        row_sum = q_i.new_zeros(len(q_i), 1)
        row_max = torch.full_like(row_sum, NEG_INF)
        for n_block, cols in enumerate(blocks(len(k), sizes.block_n)):
            kind = tile_kind(rows, cols, len(k) - len(q)) if causal else "full"
            if kind == "skip":
                break
            k_j, v_j = memory.load(k, cols).to(dtype), memory.load(v, cols).to(dtype)
            scores = q_i @ k_j.T * scale
            if kind == "partial":
                scores = scores.masked_fill(~causal_mask(rows, cols, len(k) - len(q)), NEG_INF)
            new_max = torch.maximum(row_max, row_maximum(scores))
            shift = finite_shift(new_max)
            exps = torch.exp(scores - shift)
            rescale = torch.exp(row_max - shift)
            row_sum = rescale * row_sum + exps.sum(dim=1, keepdim=True)
            acc = rescale * acc + exps @ v_j
            row_max = new_max
            if observe is not None:
                observe(Step(m_block, n_block, row_max, row_sum, normalise(acc, row_sum)))
        memory.store(normalise(acc, row_sum), out, rows)
        memory.store((row_max + row_sum.log()).squeeze(1), lse, rows)
    return out, lse


def causal_mask(rows: slice, cols: slice, offset: int) -> Tensor:
    """(rows, cols) bool: key ``col`` is visible to query ``row`` if col <= row + offset."""
    return torch.arange(cols.start, cols.stop) <= torch.arange(rows.start, rows.stop)[:, None] + offset


def tile_kind(rows: slice, cols: slice, offset: int) -> str:
    """What a causal mask hides of a tile: "skip" if the whole, "full" if nothing, else "partial".

    A tile needs no mask if its last column is visible to its first row: every column at or before every row.
    ``offset`` is seqlen_k - seqlen_q.
    """
    if cols.start > rows.stop - 1 + offset:
        return "skip"
    return "full" if cols.stop - 1 <= rows.start + offset else "partial"


# -----------------------------------------------------------------------------------------------------------
# One program per query block, as on a GPU


class Program(NamedTuple):
    """What one program of the grid works on."""

    b: int
    h: int
    m_block: int


def grid_size(batch: int, num_heads: int, seqlen_q: int, block_m: int) -> int:
    """Programs of a one-dimensional grid with one program per query block, head and batch entry."""
    return -(-seqlen_q // block_m) * batch * num_heads


def decode_program(pid: int, num_heads: int, seqlen_q: int, block_m: int) -> Program:
    """Which (b, h, m_block) the program ``pid`` of the grid takes; query blocks run fastest."""
    head, m_block = divmod(pid, -(-seqlen_q // block_m))
    b, h = divmod(head, num_heads)
    return Program(b, h, m_block)


def grid_attention(
    q: Tensor, k: Tensor, v: Tensor, block_m: int, block_n: int, scale: float = 1.0,
    memory: Memory | None = None,
) -> Tensor:  # fmt: skip
    """The loops of FlashAttention-2 with the update of FlashAttention: normalised after every key block.

    Written as a GPU kernel is: every program decodes its number, tiles always have the full size, rows beyond
    the end are loaded as zeros and never stored, columns beyond the end are set to -inf before the maximum. P
    is rounded to the inputs' dtype for the second product, whose operands must agree, and summed unrounded.

    Args:
        q, k, v: (batch, num_heads, seqlen, head_dim) of any strides; head_dim may be any number.
    """
    memory = memory or Memory()
    batch, num_heads, seqlen_q, _ = q.shape
    out = torch.empty(batch, num_heads, seqlen_q, v.shape[3], dtype=q.dtype)
    for pid in range(grid_size(batch, num_heads, seqlen_q, block_m)):
        b, h, m_block = decode_program(pid, num_heads, seqlen_q, block_m)
        first_row = m_block * block_m  # the tile's place enters the address once
        q_i = _load_tile(q[b, h], first_row, block_m, memory)
        acc = torch.zeros(block_m, v.shape[3], dtype=accumulation_dtype(q))
        row_sum = acc.new_zeros(block_m, 1)
        row_max = torch.full_like(row_sum, NEG_INF)
        for first_col in range(0, k.shape[2], block_n):
            k_j = _load_tile(k[b, h], first_col, block_n, memory)
            v_j = _load_tile(v[b, h], first_col, block_n, memory)
            scores = _product(q_i, k_j.T) * scale
            cols = first_col + torch.arange(block_n)
            scores = scores.masked_fill(cols >= k.shape[2], NEG_INF)
            new_max = torch.maximum(row_max, row_maximum(scores))
            exps = torch.exp(scores - new_max)
            rescale = torch.exp(row_max - new_max)
            new_sum = rescale * row_sum + exps.sum(dim=1, keepdim=True)
            acc = acc * (rescale * row_sum / new_sum) + _product(exps.to(v.dtype), v_j) / new_sum
            row_max, row_sum = new_max, new_sum
        rows = slice(first_row, min(first_row + block_m, seqlen_q))
        memory.store(acc[: rows.stop - rows.start], out, b, h, rows)
    return out


def _load_tile(x: Tensor, first: int, size: int, memory: Memory) -> Tensor:
    """(size, features): rows first.. of x, zeros beyond its end; only rows that exist are read."""
    tile = x.new_zeros(size, x.shape[1])
    there = memory.load(x, slice(first, first + size))
    tile[: len(there)] = there
    return tile


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of two tiles of one dtype, summed in the accumulation dtype as tensor cores do."""
    if a.dtype != b.dtype:
        raise TypeError(f"both operands of a tile product need one dtype, got {a.dtype} and {b.dtype}")
    dtype = accumulation_dtype(a)
    return a.to(dtype) @ b.to(dtype)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, block_n: int = 4) -> Tensor:
    """FlashAttention on (batch, num_heads, seqlen, head_dim) tensors with a key padding mask.

    Block sizes are fixed: B_c = ``block_n``, B_r = min(B_c, head_dim). The scale is 1 / sqrt(head_dim).

    Args:
        keep: (batch, seqlen_k) bool, True where a key counts, the same for all heads and queries of a batch
            entry. None: every key counts.

    Returns:
        (batch, num_heads, seqlen_q, head_dim_v), dtype of q; 0 for batch entries without a key that counts.

    Raises:
        TypeError: the mask is not bool. A float mask is added to scores elsewhere, where 0 keeps and 1 keeps.
        ValueError: the mask is not (batch, seqlen_k).
    """
    batch, num_heads, seqlen_q, head_dim = q.shape
    if keep is not None:
        if keep.dtype != torch.bool:
            raise TypeError(f"keep must be bool (True counts), got {keep.dtype}")
        if keep.shape != (batch, k.shape[2]):
            wanted = (batch, k.shape[2])
            raise ValueError(f"keep must be (batch, seqlen_k) = {wanted}, got {tuple(keep.shape)}")
    sizes = BlockSizes(min(block_n, head_dim), block_n)
    out = torch.empty(batch, num_heads, seqlen_q, v.shape[3], dtype=q.dtype)
    for b in range(batch):
        mask = None if keep is None else keep[b].expand(seqlen_q, -1)
        for h in range(num_heads):
            out[b, h] = flash_attention_1(q[b, h], k[b, h], v[b, h], sizes, head_dim**-0.5, mask)
    return out
