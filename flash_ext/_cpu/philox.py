"""Which attention weights dropout keeps: a pure function of seed, offset, sequence, head, row and key.

Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with seven rounds, the fewest
that pass BigCrush. Nothing depends on tile sizes, on the device or on how sequences are packed, so a backward
pass makes the mask of its forward pass again. All words are 32-bit values held in int64 tensors.

A first call per (sequence, head) turns seed and offset into a key of its own; a second call per 2 x 4 group
of weights gives the eight 16-bit numbers that are compared with the threshold. A group takes the rows r and
r + 8 of 16 and the keys c, c + 8, c + 16 and c + 24 of 32, which one thread of a tensor core product holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL_CONSTANTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def drop_threshold(dropout_p: float) -> int:
    """How many of the 65536 16-bit numbers mean "drop", 0..65536; a tie rounds to the even number."""
    return round(dropout_p * 65536)


def keep_factor(dropout_p: float) -> float:
    """What kept weights are multiplied with, one over the exact probability of being kept; 0 if none is."""
    kept = 65536 - drop_threshold(dropout_p)
    return 65536 / kept if kept else 0.0


def keep_mask(
    rng: Tensor, dropout_p: float, batch_indices: Tensor, num_heads: int, rows: Tensor, cols: Tensor
) -> Tensor:
    """True where a weight is kept, (len(batch_indices), num_heads, len(rows), len(cols)) bool.

    Args:
        rng: (2,) int64: seed and offset, read as unsigned.
        dropout_p: probability of being dropped, 0..1, realised in steps of 1/65536.
        batch_indices: (n,) int64 indices of sequences, in the batch or among the packed ones.
        num_heads: number of query heads.
        rows, cols: 1-D int64 positions of queries and keys inside their sequence.
    """
    rng = rng.to(rows.device)
    heads = torch.arange(num_heads, device=rows.device)
    offset, seed = _halves(rng[1]), _halves(rng[0])
    x = _philox((*offset, batch_indices.to(rows.device)[:, None], heads), seed)
    x0, x1, x2, x3 = (word[:, :, None, None] for word in x)

    groups_r, of_row = torch.unique(rows // 16 * 8 + rows % 8, return_inverse=True)
    groups_c, of_col = torch.unique(cols // 32 * 8 + cols % 8, return_inverse=True)
    words = torch.stack(_philox((groups_r[:, None], groups_c, x2, x3), (x0, x1)), dim=-1)
    word = words[:, :, of_row[:, None], of_col, cols % 32 // 8]
    number = (word >> (16 * (rows // 8 % 2))[:, None]) & 0xFFFF
    return number >= drop_threshold(dropout_p)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of int64 values."""
    return x & 0xFFFFFFFF, (x >> 32) & 0xFFFFFFFF


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit values, by halves since int64 cannot hold all of it."""
    low = x * (constant & 0xFFFF)
    middle = x * (constant >> 16) + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | (low & 0xFFFF)


def _philox(counter: Words, key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Words:
    """Philox4x32 of broadcastable words."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_CONSTANTS[0]) & 0xFFFFFFFF, (k1 + WEYL_CONSTANTS[1]) & 0xFFFFFFFF
    shape = torch.broadcast_shapes(*(word.shape for word in (c0, c1, c2, c3)))
    return c0.expand(shape), c1.expand(shape), c2.expand(shape), c3.expand(shape)
