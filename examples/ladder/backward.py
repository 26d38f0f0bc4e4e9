"""The gradients of attention in the order of both versions of FlashAttention, counting what crosses the
memory border.

For reading and testing, as :mod:`examples.ladder.algorithms`, whose conventions hold. P is formed again from
lse, which the forward keeps. What a row needs beside it is delta = rowsum(dO * O), the sum of P * dP over its
keys:

    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ = scale dS K    dK = scale dS^T Q

Sources: Algorithm 4 of Dao et al. 2022 (https://arxiv.org/abs/2205.14135), Algorithm 2 of Dao 2023
(https://arxiv.org/abs/2307.08691). The first forms delta again for every key block; here both form it once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .algorithms import BlockSizes, Memory, accumulation_dtype, blocks


class Gradients(NamedTuple):
    """Of q, k and v, each with its shape and dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def row_deltas(out: Tensor, dout: Tensor, memory: Memory) -> Tensor:
    """(seqlen_q,): what is subtracted from dP."""
    dtype = accumulation_dtype(out)
    delta = torch.empty(len(out), dtype=dtype)
    memory.store((memory.load(dout).to(dtype) * memory.load(out).to(dtype)).sum(dim=1), delta)
    return delta


def flash_attention_1_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, sizes: BlockSizes,
    scale: float = 1.0, memory: Memory | None = None,
) -> Gradients:  # fmt: skip
    """FlashAttention: key blocks outside, query blocks inside, dQ in memory between steps.

    Numbered comments are the lines of the paper's Algorithm 4.
    """
    memory = memory or Memory()
    dtype = accumulation_dtype(q)
    delta = row_deltas(out, dout, memory)
    dq = memory.allocate(*q.shape, value=0.0, like=q)  # 5
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for cols in blocks(len(k), sizes.block_n):  # 6
        k_j, v_j = memory.load(k, cols).to(dtype), memory.load(v, cols).to(dtype)  # 7
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # 8
        for rows in blocks(len(q), sizes.block_m):  # 9
            q_i, dout_i = memory.load(q, rows).to(dtype), memory.load(dout, rows).to(dtype)  # 10
            lse_i, delta_i = memory.load(lse, rows)[:, None], memory.load(delta, rows)[:, None]
            weights = torch.exp(q_i @ k_j.T * scale - lse_i)  # 11 to 13
            dv_j += weights.T @ dout_i  # 16
            dscores = weights * (dout_i @ v_j.T - delta_i)  # 17 to 20
            memory.store(memory.load(dq, rows) + scale * dscores @ k_j, dq, rows)  # 21
            dk_j += scale * dscores.T @ q_i  # 22
        memory.store(dk_j, dk, cols)  # 24
        memory.store(dv_j, dv, cols)
    return Gradients(dq.to(q.dtype), dk, dv)


def flash_attention_2_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, sizes: BlockSizes,
    scale: float = 1.0, memory: Memory | None = None, order: list[int] | None = None,
) -> Gradients:  # fmt: skip
    """FlashAttention-2: the same loops, but each key block is a program of its own that adds to dQ.

    Programs meet in memory alone, by additions that no other one may come between. An addition counts as a
    load and a store.

    Args:
        order: in which the programs run, as numbers of key blocks; the result does not depend on it but for
            rounding.
    """
    memory = memory or Memory()
    dtype = accumulation_dtype(q)
    delta = row_deltas(out, dout, memory)
    dq = memory.allocate(*q.shape, value=0.0, like=q)
    dk, dv = torch.empty_like(k), torch.empty_like(v)

    def program(cols: slice) -> None:
        k_j, v_j = memory.load(k, cols).to(dtype), memory.load(v, cols).to(dtype)  # 6
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # 7
        for rows in blocks(len(q), sizes.block_m):  # 8
            q_i, dout_i = memory.load(q, rows).to(dtype), memory.load(dout, rows).to(dtype)  # 9
            lse_i, delta_i = memory.load(lse, rows)[:, None], memory.load(delta, rows)[:, None]
            weights = torch.exp(q_i @ k_j.T * scale - lse_i)  # 10, 11
            dv_j += weights.T @ dout_i  # 12
            dscores = weights * (dout_i @ v_j.T - delta_i)  # 13, 14
            memory.store(memory.load(dq, rows) + scale * dscores @ k_j, dq, rows)  # 15
            dk_j += scale * dscores.T @ q_i  # 16
        memory.store(dk_j, dk, cols)  # 18
        memory.store(dv_j, dv, cols)

    key_blocks = blocks(len(k), sizes.block_n)
    for number in range(len(key_blocks)) if order is None else order:  # 5
        program(key_blocks[number])
    return Gradients(dq.to(q.dtype), dk, dv)
