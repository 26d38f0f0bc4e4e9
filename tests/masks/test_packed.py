"""Masks of packed sequences: bands inside each sequence, ids and intervals along the packed rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._masks.lower import terms_for
from flash_ext._masks.value import Mask, Not, Sizes, _Join
from tests.masks.test_masks import SLOW

HEADS = 2


def bounds_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def own(mask: Mask, s: int, rows: slice, keys: slice, negated: bool = False) -> Mask:
    """The mask of one sequence, for a call that is not packed."""
    q_len, k_len = rows.stop - rows.start, keys.stop - keys.start
    if isinstance(mask, Not):
        return own(mask.mask, s, rows, keys, not negated)
    if isinstance(mask, _Join):
        join = masks.Mask.__or__ if (type(mask).__name__ == "Or") != negated else masks.Mask.__and__
        total = own(mask.masks[0], s, rows, keys, negated)
        for part in mask.masks[1:]:
            total = join(total, own(part, s, rows, keys, negated))
        return total
    if isinstance(mask, (masks.Dense, masks.BlockMask)):
        keep = mask.tensor if isinstance(mask, masks.Dense) else map_of(mask)
        keep = keep[min(s, len(keep) - 1)]
        keep = (~keep if negated else keep)[:, :q_len, :k_len]
        ends = (k_len if keep.shape[2] != 1 else 1), (q_len if keep.shape[1] != 1 else 1)
        # What lies beyond is hidden, also of the opposite.
        return masks.Dense(F.pad(keep, (0, ends[0] - keep.shape[2], 0, ends[1] - keep.shape[1])))
    if isinstance(mask, masks.Documents):
        mask = masks.Documents(mask.ids[rows], mask.of_keys[keys])
    elif isinstance(mask, masks.KeyMask):
        mask = masks.KeyMask(mask.keep[keys])
    elif isinstance(mask, masks.Prefix):
        mask = masks.Prefix(mask.lens[min(s, len(mask.lens) - 1)][None])
    elif isinstance(mask, masks.HiddenRows):
        mask = masks.HiddenRows(mask.intervals[:, keys])
    elif isinstance(mask, masks.HiddenKeys):
        mask = masks.HiddenKeys(mask.intervals[:, rows])
    return ~mask if negated else mask


def map_of(mask: masks.BlockMask) -> Tensor:
    """Blocks written out by PyTorch's own means, with what is said inside them."""
    rows, cols = mask.block_size
    keep = mask.blocks.repeat_interleave(rows, 2).repeat_interleave(cols, 3)
    if mask.elements is not None:
        keep = keep[:, :, : mask.elements.shape[2], : mask.elements.shape[3]] & mask.elements
    return keep


def means(mask: Mask, lens_q: list[int], lens_k: list[int]) -> Tensor:
    total = torch.zeros(1, HEADS, sum(lens_q), sum(lens_k), dtype=torch.bool)
    bounds_q, bounds_k = bounds_of(lens_q), bounds_of(lens_k)
    for s, lengths in enumerate(zip(lens_q, lens_k)):
        rows, keys = slice(bounds_q[s], bounds_q[s + 1]), slice(bounds_k[s], bounds_k[s + 1])
        if min(lengths):
            total[:, :, rows, keys] = own(mask, s, rows, keys).to_dense(*lengths, num_heads=HEADS)
    return total


@st.composite
def packed_masks(draw, lens_q: list[int], lens_k: list[int]) -> Mask:
    """Of the form that kernels execute."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, total_q, total_k = len(lens_q), sum(lens_q), sum(lens_k)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    def truth(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < 0.7

    def dense(ends: tuple[int, ...] = (1, 5, 40)) -> Mask:
        lead = draw(st.sampled_from([(1, 1), (n, 1), (1, HEADS), (n, HEADS)]))
        return masks.Dense(truth(*lead, draw(st.sampled_from(ends)), draw(st.sampled_from(ends))))

    def blocks() -> Mask:
        lead = draw(st.sampled_from([(1, 1), (n, HEADS)]))
        elements = truth(*lead, 20, 25) if draw(st.booleans()) else None
        return masks.BlockMask(truth(*lead, 2, 2), 16, elements)

    hides = {
        "documents": lambda: masks.Documents(numbers(-1, 2, total_q), numbers(-1, 2, total_k)),
        "keys": lambda: masks.KeyMask(truth(total_k)),
        "not keys": lambda: ~masks.KeyMask(truth(total_k)),
        "rows": lambda: masks.HiddenRows(numbers(0, 20, draw(st.sampled_from([1, HEADS])), total_k, 2)),
        "row keys": lambda: masks.HiddenKeys(numbers(0, 20, 1, total_q, 4)),
        "dense": dense,
        "not dense": lambda: ~dense(),
        "any dense": lambda: dense((5, 40)) | ~dense((7, 40)),
        "blocks": blocks,
        "not blocks": lambda: ~blocks(),
        "both blocks": lambda: blocks() & ~blocks(),
    }
    alignment = draw(st.sampled_from(["bottom_right", "top_left"]))
    mask = masks.Causal(alignment)
    if draw(st.booleans()):
        mask = mask & (masks.Window(draw(st.integers(0, 6)), -1, alignment) | masks.SinkTokens(2))
    if draw(st.booleans()):
        mask = mask | masks.Prefix(numbers(0, 9, n))
    for name in draw(st.lists(st.sampled_from(sorted(hides)), max_size=3, unique=True)):
        mask = mask & hides[name]()
    return mask


LENGTHS = st.lists(st.integers(0, 24), min_size=3, max_size=3)


@settings(max_examples=40, suppress_health_check=SLOW)
@given(st.data())
def test_packed_calls_do_what_the_mask_of_each_sequence_says(data: st.DataObject) -> None:
    lens_q, lens_k = data.draw(LENGTHS), data.draw(LENGTHS)
    mask = data.draw(packed_masks(lens_q, lens_k))
    want = means(mask, lens_q, lens_k)
    cu = [torch.tensor(bounds_of(lens), dtype=torch.int32) for lens in (lens_q, lens_k)]
    dense = mask.to_dense(sum(lens_q), sum(lens_k), num_heads=HEADS, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    assert torch.equal(dense, want), mask

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lens), HEADS, 8, generator=generator) for lens in (lens_q, lens_k, lens_k))
    out = flash_ext.attention_varlen(q, k, v, *cu, mask=mask)
    torch.testing.assert_close(out, flash_ext.attention(q[None], k[None], v[None], mask=want)[0])


def test_rows_and_keys_of_no_sequence_are_hidden() -> None:
    cu = torch.tensor([1, 3], dtype=torch.int32)
    dense = masks.Window().to_dense(5, 4, cu_seqlens_q=cu, cu_seqlens_k=cu)[0, 0]
    want = torch.zeros(5, 4, dtype=torch.bool)
    want[1:3, 1:3] = True
    assert torch.equal(dense, want)
    none = torch.zeros(1, dtype=torch.int32)
    assert not masks.Window().to_dense(2, 2, cu_seqlens_q=none, cu_seqlens_k=none).any()


def test_what_counts_differently_in_packed_calls_is_refused() -> None:
    sizes = Sizes(True, 2, 1, 8, 8)
    keys, dense = masks.KeyMask(torch.ones(8) > 0), masks.Dense(torch.ones(4, 4) > 0)
    with pytest.raises(ValueError, match="KeyMask counts packed keys and Dense those of a sequence"):
        terms_for(keys | dense, None, sizes)
    assert terms_for(keys & dense, None, sizes).dense is dense.tensor
    small, large = (masks.BlockMask(torch.ones(n, n) > 0, 16) for n in (1, 2))
    with pytest.raises(ValueError, match=r"same number of rows and keys .*got \(16, 16\) and \(32, 32\)"):
        terms_for(small | large, None, sizes)
    repeats = masks.Dense(torch.ones(1, 4) > 0)
    with pytest.raises(ValueError, match="one repeats its row or its column has no kernel in packed calls"):
        terms_for(dense | repeats, None, sizes)
    assert terms_for(dense & repeats, None, sizes).dense.shape == (1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"KeyMask: keep must have shape \(total_k,\) = \(8,\), got \(2, "):
        terms_for(masks.KeyMask(torch.ones(2, 8) > 0), None, sizes)
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k belong together, got one of them"):
        keys.to_dense(8, 8, cu_seqlens_k=torch.tensor([0, 4, 8]))
    with pytest.raises(ValueError, match="batch must be the number of sequences, 2"):
        cu = torch.tensor([0, 4, 8])
        keys.to_dense(8, 8, batch=3, cu_seqlens_q=cu, cu_seqlens_k=cu)
