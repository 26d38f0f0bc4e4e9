"""The dropout mask: Philox against published vectors, the mask against plain integers, and its statistics.

Both accounts of it, that of the CPU backend and that of the oracle.
"""

from __future__ import annotations

import math

import pytest
import torch

from flash_ext._cpu.philox import _philox, drop_threshold, keep_factor, keep_mask
from tests import philox

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 6


@pytest.mark.parametrize("rounds, words, expected", [
    (7, (0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_known_answers(rounds, words, expected):
    """The vectors that Salmon et al. publish with Random123 (four words of counter, two of key)."""
    counter, key = tuple(torch.tensor(w) for w in words[:4]), tuple(torch.tensor(w) for w in words[4:])
    for generate in (_philox, philox.philox):
        assert tuple(int(w) for w in generate(counter, key, rounds)) == expected


def test_both_generators_agree():
    """On random words, and on products as large as they become."""
    words = torch.randint(0, 2**32, (6, 5000))
    words[:, ::7] = 2**32 - 1
    counter, key = tuple(words[:4]), tuple(words[4:])
    for rounds in (1, 7, 10):
        ours, theirs = (generate(counter, key, rounds) for generate in (_philox, philox.philox))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 5), (5, 0), (1, 1), (16, 32), (17, 33), (100, 61)])
@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 1.0])
def test_both_masks_agree(seqlen_q, seqlen_k, p):
    """For whole masks, on random seeds and offsets, and in what is kept weights are multiplied by."""
    rng, sequences = torch.randint(-(2**63), 2**63 - 1, (2,)), torch.tensor([0, 3, 70000])
    ours = keep_mask(rng, p, sequences, 2, torch.arange(seqlen_q), torch.arange(seqlen_k))
    assert torch.equal(philox.kept(rng, p, sequences, 2, seqlen_q, seqlen_k), ours)
    factors = philox.factors(rng, p, sequences, 2, seqlen_q, seqlen_k)
    assert torch.equal(factors, ours * torch.tensor(keep_factor(p), dtype=torch.float64))


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    """Seven rounds in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def keeps(seed: int, offset: int, threshold: int, b: int, h: int, r: int, c: int) -> bool:
    """One weight, from the definition."""
    x = philox_of_integers([offset % 2**32, offset >> 32, b, h], [seed % 2**32, seed >> 32])
    y = philox_of_integers([r // 16 * 8 + r % 8, c // 32 * 8 + c % 8, x[2], x[3]], x[:2])
    return (y[c % 32 // 8] >> (16 if r // 8 % 2 else 0)) % 2**16 >= threshold


def rng_of(seed: int, offset: int) -> torch.Tensor:
    """(2,) int64 that holds two unsigned numbers."""
    return torch.tensor([x - 2**64 if x >= 2**63 else x for x in (seed, offset)])


@pytest.mark.parametrize("seed, offset", [
    (0, 0), (1234, 56), (2**63 - 1, 2**32 - 1), (2**64 - 1, 2**32), (2**63, 2**64 - 1),
])  # fmt: skip
def test_mask_equals_the_definition_in_plain_integers(seed, offset):
    """Every bit of seed and offset counts, beyond the sign as well."""
    rows, cols = torch.tensor([0, 7, 8, 15, 16, 31, 200, 70000]), torch.tensor([0, 8, 17, 31, 32, 63, 99999])
    batch_indices, threshold = torch.tensor([0, 3, 70000]), drop_threshold(0.4)
    mask = keep_mask(rng_of(seed, offset), 0.4, batch_indices, 2, rows, cols)
    assert mask.shape == (3, 2, 8, 7) and mask.dtype == torch.bool
    expected = [[[[keeps(seed, offset, threshold, b, h, r, c) for c in cols.tolist()] for r in rows.tolist()]
                 for h in range(2)] for b in batch_indices.tolist()]  # fmt: skip
    assert torch.equal(mask, torch.tensor(expected))


def mask_of(p: float, rows: int = 256, cols: int = 256, **changes: int) -> torch.Tensor:
    at = {"seed": 7, "offset": 11, "b": 2, **changes}
    return keep_mask(rng_of(at["seed"], at["offset"]), p, torch.tensor([at["b"]]), at.get("heads", 1),
                     torch.arange(rows), torch.arange(cols))[0]  # fmt: skip


def test_any_part_of_the_mask_is_the_same_alone():
    """Tiles of any size and order see one mask."""
    whole = mask_of(0.5, 100, 90, heads=3)
    rows, cols = torch.tensor([99, 3, 50, 51, 8]), torch.arange(37, 61)
    part = keep_mask(rng_of(7, 11), 0.5, torch.tensor([2]), 3, rows, cols)[0]
    assert torch.equal(part, whole[:, rows][:, :, cols])
    assert keep_mask(rng_of(7, 11), 0.5, torch.tensor([2]), 3, rows[:0], cols).shape == (1, 3, 0, 24)


def plausible(kept: torch.Tensor, count: int, p: float) -> bool:
    """Whether numbers of kept weights out of ``count`` lie within 6 standard deviations (p-value 2e-9)."""
    mean, deviation = count * (1 - p), math.sqrt(count * p * (1 - p))
    return bool(((kept - mean).abs() <= 6 * deviation).all())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate(p):
    """In all, per head, per row, per key and per place in a 16 x 32 tile."""
    mask = mask_of(p, 512, 512, heads=8).double()
    assert plausible(mask.sum(), mask.numel(), p)
    for dims in ((1, 2), (0, 2), (0, 1)):
        kept = mask.sum(dims)
        assert plausible(kept, mask.numel() // kept.numel(), p)
    places = mask.view(8, 32, 16, 16, 32).sum((0, 1, 3))
    assert plausible(places, 8 * 32 * 16, p)


@pytest.mark.parametrize("change", [{"seed": 8}, {"seed": 7 + 2**32}, {"offset": 12}, {"b": 3}])
def test_each_input_gives_an_unrelated_mask(change):
    """Half of all weights agree by chance, among heads, shifted rows and shifted keys as well."""
    mask, other = mask_of(0.5), mask_of(0.5, **change)
    assert plausible((mask == other).sum(), mask.numel(), 0.5)
    heads = mask_of(0.5, heads=2)
    for a, b in ((heads[:1], heads[1:]), (mask[:, 8:], mask[:, :-8]), (mask[:, :, 8:], mask[:, :, :-8])):
        assert plausible((a == b).sum(), a.numel(), 0.5)


def test_the_realised_probability_is_unbiased():
    """Kept weights are scaled by the probability that is drawn, not by the one asked for."""
    assert (drop_threshold(0.0), drop_threshold(1.0)) == (0, 65536)
    assert (keep_factor(0.0), keep_factor(0.5), keep_factor(1.0)) == (1.0, 2.0, 0.0)
    assert drop_threshold(0.1) == 6554 and keep_factor(0.1) == 65536 / (65536 - 6554)
    assert mask_of(0.0).all() and not mask_of(1.0).any()
    assert drop_threshold(1e-6) == 0 and drop_threshold(1 - 1e-6) == 65536
