"""How Hopper's tensor cores add products of e4m3 numbers.

A step of wgmma adds 32 products to each element of the accumulator. Every product, and the accumulator, is
cut to a multiple of 2^-13 of the largest of them, towards zero. Their sum is exact. It keeps 13 bits behind
its leading one, cut towards zero as well. Largest means the largest power of two: that of a product is the
product of those of its factors, and a number below 2^-6 counts as 2^-6.

Two errors measured on an H200 are those of this rule in every digit that was recorded
(tests/fp8/test_tensor_cores.py). One bit more, or rounding downwards, gives others. An accumulator in float16
has the exact sum, rounded to nearest: of 16384 sums of 96 to 256 products an H200 made every one so.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 32  # products of one step
BITS = 13
LEAST_NORMAL = 2.0**-6  # of e4m3


def leading_power(x: Tensor) -> Tensor:
    """The power of two at or below abs(x), float32; 0 of 0."""
    return (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def _largest_powers(a: Tensor, b: Tensor) -> Tensor:
    """The largest power of two among the products of each element of a @ b, up to 32 of them; 0 of zeros.

    Found by a matrix product of sixth powers: 32 equal ones add up to less than the next sixth power.
    """
    a, b = (torch.where(x == 0, 0.0, leading_power(x).clamp(min=LEAST_NORMAL)).double() ** 6 for x in (a, b))
    sums = a @ b
    exponent = (torch.frexp(sums).exponent - 1).div(6, rounding_mode="floor")
    return torch.where(sums == 0, 0.0, torch.exp2(exponent.float()))


def add_products(
    accumulator: Tensor, a: Tensor, b: Tensor, bits: int = BITS, *, in_half: bool = False
) -> Tensor:
    """accumulator + a @ b as wgmma computes it.

    Args:
        accumulator: (..., m, n) float32.
        a: (..., m, k) float32 holding e4m3 numbers; a k that is no multiple of 32 ends in zeros.
        b: (..., k, n) float32 holding e4m3 numbers.
        bits: behind the leading one, of what is added and of the sum.
        in_half: the accumulator is float16.

    Returns:
        (..., m, n) float32.
    """
    for first in range(0, a.shape[-1], STEP):
        p, q = a[..., first : first + STEP], b[..., first : first + STEP, :]
        largest = torch.maximum(leading_power(accumulator), _largest_powers(p, q))
        in_units = 2.0**bits / largest.clamp_(min=2.0**-100)  # all may be 0
        total = (accumulator * in_units).trunc_()
        for i in range(p.shape[-1]):
            # Below 2^15 each, so that float32 adds them exactly.
            total += (p[..., i : i + 1] * in_units).mul_(q[..., i : i + 1, :]).trunc_()
        if in_half:
            accumulator = total.div_(in_units).half().float()
            continue
        kept = leading_power(total).clamp_(min=2.0**bits) / 2.0**bits
        accumulator = (total / kept).trunc_().mul_(kept).div_(in_units)
    return accumulator


def products(a: Tensor, b: Tensor, bits: int = BITS, *, in_half: bool = False) -> Tensor:
    """a @ b; shapes as in :func:`add_products`."""
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return add_products(a.new_zeros(*shape, a.shape[-2], b.shape[-1]), a, b, bits, in_half=in_half)
