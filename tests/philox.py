"""Which weights dropout keeps, by the definition: the oracle's own account, for whole masks only.

The generator is Philox4x32 with seven rounds, as Salmon et al. define it (2011, "Parallel random numbers: as
easy as 1, 2, 3") and Random123 publishes it. Words of 32 bits stand in int64. A weight has 16 bits:

- x = philox(counter: offset low, offset high, sequence, head; key: seed low, seed high)
- y = philox(counter: 8 * (row // 16) + row % 8, 8 * (key // 32) + key % 8, x[2], x[3]; key: x[0], x[1])
- of the word y[key % 32 // 8] the high half where row % 16 is 8 or more, else the low half
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = 7) -> list[Tensor]:
    """Four words from a counter of four and a key of two; all broadcast."""
    words = list(counter)
    for number in range(rounds):
        bumps = [(key[0] + number * 0x9E3779B9) & LOW, (key[1] + number * 0xBB67AE85) & LOW]
        # int64 products wrap around, so they hold all 64 bits of the unsigned ones.
        products = [words[0] * 0xD2511F53, words[2] * 0xCD9E8D57]
        highs, lows = [p >> 32 & LOW for p in products], [p & LOW for p in products]
        words = [highs[1] ^ words[1] ^ bumps[0], lows[1], highs[0] ^ words[3] ^ bumps[1], lows[0]]
    return words


def threshold(dropout_p: float) -> int:
    """A weight is dropped where their number lies below."""
    return round(dropout_p * 2**16)


def kept(
    rng: Tensor, dropout_p: float, sequences: Tensor, num_heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """(len(sequences), num_heads, seqlen_q, seqlen_k) bool, True where a weight is kept.

    Args:
        rng: (2,) int64: seed and offset, read as unsigned.
        dropout_p: probability of being dropped, 0..1.
        sequences: (n,) int64 indices in the batch or among packed sequences; the mask lies on their device.
    """
    device = sequences.device
    seed, offset = ((word & LOW, word >> 32 & LOW) for word in rng.to(device))
    heads = torch.arange(num_heads, device=device)
    x = [word[..., None, None] for word in philox([*offset, sequences[:, None], heads], seed)]

    # Whole blocks of 16 rows and 32 keys: 8 x 8 counters, whose four words have a low and a high half.
    blocks_q, blocks_k = -(-seqlen_q // 16), -(-seqlen_k // 32)
    groups_q, groups_k = (torch.arange(8 * count, device=device) for count in (blocks_q, blocks_k))
    words = torch.stack(torch.broadcast_tensors(*philox([groups_q[:, None], groups_k, *x[2:]], x[:2])))
    numbers = torch.stack([words & 0xFFFF, words >> 16])
    n = len(sequences)
    numbers = numbers.view(2, 4, n, num_heads, blocks_q, 8, blocks_k, 8).permute(2, 3, 4, 0, 5, 6, 1, 7)
    numbers = numbers.reshape(n, num_heads, 16 * blocks_q, 32 * blocks_k)[:, :, :seqlen_q, :seqlen_k]
    return numbers >= threshold(dropout_p)


def factors(
    rng: Tensor, dropout_p: float, sequences: Tensor, num_heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """What weights are multiplied by, float64: 0, or one over the exact probability of being kept."""
    mask = kept(rng, dropout_p, sequences, num_heads, seqlen_q, seqlen_k)
    return mask.double() * (2**16 / max(2**16 - threshold(dropout_p), 1))
