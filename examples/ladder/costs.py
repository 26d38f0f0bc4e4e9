"""What attention costs: memory held, and elements or bytes moved, in closed form and counted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .algorithms import (
    BlockSizes,
    Memory,
    block_sizes,
    flash_attention_1,
    flash_attention_2,
    standard_attention,
)


class AttentionMemory(NamedTuple):
    """Bytes beyond q, k, v and out."""

    scores: int
    flash: int


def attention_memory(
    seqlen_q: int, seqlen_k: int, num_heads: int = 1, batch: int = 1, itemsize: int = 2
) -> AttentionMemory:
    """What one score matrix per head takes if it is materialised, and the float32 lse that replaces it.

    ``itemsize`` is the bytes of one score. Standard attention holds the weights as well, the same again.
    """
    rows = batch * num_heads * seqlen_q
    return AttentionMemory(scores=rows * seqlen_k * itemsize, flash=rows * 4)


def io_complexity(algorithm: str, seqlen: int, head_dim: int, sram: int) -> int:
    """Accesses of self-attention on (seqlen, head_dim) in closed form; measured by :func:`measured_accesses`.

    Args:
        algorithm: "standard", "flash1" or "flash2".
        sram: elements of fast memory, M; sets the block sizes of the two flash algorithms.
    Raises:
        ValueError: another algorithm.
    """
    n, d = seqlen, head_dim
    sizes = block_sizes(sram, d)
    num_m_blocks, num_n_blocks = -(-n // sizes.block_m), -(-n // sizes.block_n)
    if algorithm == "standard":  # q, k, v in, out out, and S and P each out and in
        return 4 * n * d + 4 * n * n
    if algorithm == "flash1":  # k, v once; per key block q in, out in and out, two statistics in and out
        return 2 * n * d + num_n_blocks * (3 * n * d + 4 * n) + n * d + 2 * n
    if algorithm == "flash2":  # q in, out and lse out; per query block k, v in
        return 2 * n * d + n + num_m_blocks * 2 * n * d
    raise ValueError(f'algorithm must be "standard", "flash1" or "flash2", got {algorithm!r}')


def measured_accesses(algorithm: str, seqlen: int, head_dim: int, sram: int) -> int:
    """Runs self-attention on random (seqlen, head_dim) tensors and returns the accesses it made."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(seqlen, head_dim, generator=generator) for _ in range(3))
    memory, sizes = Memory(), block_sizes(sram, head_dim)
    if algorithm == "standard":
        standard_attention(q, k, v, head_dim**-0.5, memory=memory)
    elif algorithm == "flash1":
        flash_attention_1(q, k, v, sizes, head_dim**-0.5, memory=memory)
    elif algorithm == "flash2":
        flash_attention_2(q, k, v, sizes, head_dim**-0.5, memory=memory)
    else:
        raise ValueError(f'algorithm must be "standard", "flash1" or "flash2", got {algorithm!r}')
    return memory.accesses


def kernel_bytes(
    algorithm: str, seqlen_q: int, seqlen_k: int, head_dim: int, sizes: BlockSizes | None
) -> int:
    """Bytes that cross the border of the chip for one head, with 16-bit tensors, if no cache holds anything.

    Args:
        algorithm: "standard" with scores and weights of 16 bits in memory; "flash1" or "flash2" as the
            kernels of the ladder are written: fp32 accumulators and statistics.
        sizes: tiles of the kernel; None for "standard".

    Raises:
        ValueError: another algorithm, or one whose tiles are missing.
    """
    queries, keys = seqlen_q * head_dim * 2, seqlen_k * head_dim * 2  # of one tensor
    if algorithm == "standard":
        return 2 * queries + 2 * keys + 4 * seqlen_q * seqlen_k * 2
    if sizes is None:
        raise ValueError(f"{algorithm!r} needs the sizes of its tiles")
    if algorithm == "flash1":
        # q in every pass over the queries; between passes the accumulator and both statistics out and in.
        passes = -(-seqlen_k // sizes.block_n)
        between = seqlen_q * (head_dim + 2) * 4
        return 2 * keys + passes * queries + (passes - 1) * 2 * between + queries + seqlen_q * 8
    if algorithm == "flash2":
        return 2 * queries + seqlen_q * 4 + -(-seqlen_q // sizes.block_m) * 2 * keys
    raise ValueError(f'algorithm must be "standard", "flash1" or "flash2", got {algorithm!r}')
