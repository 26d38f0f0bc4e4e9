"""Masks as values: what an expression means, which kernels execute, and what attention makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._masks.normal import Refused
from flash_ext._masks.value import And, Mask, Not, Or
from tests.mask_expressions import BATCH, HEADS, LENGTHS, Said, executable, expressions

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
on_lengths = st.sampled_from(LENGTHS)


def qkv(q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(q_len * 100 + k_len)
    shapes = (BATCH, q_len, HEADS, 8), (BATCH, k_len, HEADS, 8), (BATCH, k_len, HEADS, 8)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def check_executed(said: Said, q_len: int, k_len: int) -> None:
    """Attention shows what the mask means."""
    inputs = qkv(q_len, k_len)
    want = flash_ext.attention(*inputs, mask=said.means)
    torch.testing.assert_close(flash_ext.attention(*inputs, mask=said.mask), want)


# ---- meaning ------------------------------------------------------------------------------------------


@settings(max_examples=20, suppress_health_check=SLOW)
@given(st.data())
def test_an_expression_means_what_boolean_algebra_says(data: st.DataObject) -> None:
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(expressions(q_len, k_len))
    dense = said.mask.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS)
    assert torch.equal(dense, said.means), said.mask


@settings(max_examples=25, suppress_health_check=SLOW)
@given(st.data())
def test_kernels_execute_an_expression_or_it_is_refused(data: st.DataObject) -> None:
    """And each refusal names the way out, which exists for every expression."""
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(expressions(q_len, k_len))
    try:
        check_executed(said, q_len, k_len)
    except Refused as refused:
        assert repr(said.mask) in str(refused)
        assert str(refused).endswith("Or spend memory on it: BlockMask.from_mask(mask, q_len, k_len).")
        blocks = masks.BlockMask.from_mask(said.mask, q_len, k_len, block_size=16)
        assert torch.equal(blocks.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS), said.means)
        check_executed(Said(blocks, said.means), q_len, k_len)
    except ValueError as refused:
        assert "top_left" in str(refused) and q_len != k_len, refused


@settings(max_examples=25, suppress_health_check=SLOW)
@given(st.data())
def test_forms_that_kernels_have_are_executed(data: st.DataObject) -> None:
    """However they are written."""
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(executable(q_len, k_len))
    assert torch.equal(said.mask.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS), said.means)
    try:
        check_executed(said, q_len, k_len)
    except ValueError as refused:
        words = ("stands once", "may hold 2 intervals", "cut each other", "top_left", "of Chunks with other",
                 "lower bound on the right")  # fmt: skip
        assert any(word in str(refused) for word in words), refused


DOCS = masks.Documents(torch.arange(12) // 5)
W, S, C = masks.Window, masks.SinkTokens, masks.Chunks
CAUSAL = masks.Causal()

# Expressions, and what rows reach: left, right, chunk, sink tokens.
REACHES: list[tuple[Mask, tuple[int, int, int, int]]] = [
    (W() & DOCS, (-1, -1, 0, 0)), (W(3, 0) | W(1, 2), (3, 2, 0, 0)), (W(3, 0) | CAUSAL, (-1, 0, 0, 0)),
    (W(3, 0) | W(1, -1) | W(2, 2), (3, -1, 0, 0)), (W(3, 0) & W(1, 2), (1, 0, 0, 0)),
    ((W(3, 0) & C(4)) | CAUSAL, (-1, 0, 0, 0)), (C(4) | C(8), (-1, -1, 8, 0)), (C(4) & C(8), (-1, -1, 4, 0)),
    ((C(4) & W(1, 1)) | (C(8) & W(2, 2)), (2, 2, 8, 0)), (CAUSAL & (W(3, -1) | S(1) | S(2)), (3, 0, 0, 2)),
    ((CAUSAL & W(3, 5)) & (W(4, 9) | S(0)), (3, 0, 0, 0)), ((CAUSAL | W(3, -1) | S(2)), (-1, -1, 0, 0)),
    (CAUSAL & (W(3, -1) | S(2)) & (W(5, -1) | S(2)), (3, 0, 0, 2)),
    ((CAUSAL & (W(3, -1) | S(2))) | (CAUSAL & (W(5, -1) | S(1))), (5, 0, 0, 2)),
    ((CAUSAL & (CAUSAL | S(2))) | W(1, 5), (-1, 5, 0, 0)),
    (CAUSAL & (W(3, -1) | S(2)) & W(-1, 7), (3, 0, 0, 2)), (DOCS & CAUSAL & DOCS, (-1, 0, 0, 0)),
    (~(~CAUSAL & ~W(2, 3)), (-1, 3, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("mask, reach", REACHES, ids=[repr(mask) for mask, _ in REACHES])
def test_what_rows_reach(mask: Mask, reach: tuple[int, int, int, int]) -> None:
    assert mask.normal().bands()[:4] == reach
    check_executed(Said(mask, mask.to_dense(12, 12, batch=BATCH, num_heads=HEADS)), 12, 12)


def test_numbers_beyond_int32_mean_what_they_say() -> None:
    """Ids must fit; lengths and bounds of intervals are cut to what they mean."""
    far = 2**40
    for mask in (
        masks.PrefixLM(torch.tensor([far + 1])),
        masks.PrefixLM(torch.tensor([-far + 5])),
        masks.Causal() | masks.Prefix(torch.tensor([3])) | masks.Prefix(torch.tensor([-far + 7])),
        masks.HiddenRows(torch.tensor([2, far + 3]).expand(12, 2)),
        masks.HiddenKeys(torch.tensor([-far + 9, 4]).expand(12, 2)),
    ):
        check_executed(Said(mask, mask.to_dense(12, 12, batch=BATCH, num_heads=HEADS)), 12, 12)


def turned(mask: Mask) -> Mask:
    """With the operands of every node in the opposite order."""
    if isinstance(mask, (And, Or)):
        return type(mask)(tuple(turned(part) for part in reversed(mask.masks)))
    return Not(turned(mask.mask)) if isinstance(mask, Not) else mask


@settings(max_examples=25, suppress_health_check=SLOW)
@given(st.data())
def test_the_order_of_operands_changes_nothing(data: st.DataObject) -> None:
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(expressions(q_len, k_len) if data.draw(st.booleans()) else executable(q_len, k_len))
    bands = []
    for mask in (said.mask, turned(said.mask)):
        try:
            normal = mask.normal()
            found = normal.bands()
            hides = [len(group) for group in normal[4:]], normal.documents
            bands.append((found[:4], set(found.prefixes), hides))
        except ValueError:
            bands.append(None)
    assert bands[0] == bands[1], said.mask


@pytest.mark.parametrize(
    "sizes_of_blocks", [((32, 48), (48, 32)), ((64, 32), (16, 96)), ((16, 16), (48, 64))]
)
@pytest.mark.parametrize("cut", [(False, False), (True, False), (True, True)])
def test_block_masks_of_two_sizes(
    sizes_of_blocks: tuple[tuple[int, int], ...], cut: tuple[bool, bool]
) -> None:
    """They meet in blocks of a size that divides both, of which none lies beyond the lengths."""
    generator = torch.Generator().manual_seed(1)
    q_len, k_len = 70, 100
    said = []
    for (rows, cols), is_cut in zip(sizes_of_blocks, cut):
        blocks = torch.rand(BATCH, 1, -(-q_len // rows), -(-k_len // cols), generator=generator) < 0.6
        elements = torch.rand(1, HEADS, q_len, k_len, generator=generator) < 0.6 if is_cut else None
        means = blocks.repeat_interleave(rows, 2).repeat_interleave(cols, 3)[:, :, :q_len, :k_len]
        means = means.expand(BATCH, HEADS, q_len, k_len)
        mask = masks.BlockMask(blocks, (rows, cols), elements)
        said.append(Said(mask, means if elements is None else means & elements))
    a, b = said
    for mask, means in (
        (a.mask & b.mask, a.means & b.means),
        (a.mask & masks.Dense(b.means), a.means & b.means),
        (a.mask | b.mask, a.means | b.means),
        (~a.mask & b.mask, ~a.means & b.means),
        (~(a.mask | ~b.mask) | a.mask, (~a.means & b.means) | a.means),
    ):
        assert torch.equal(mask.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS), means)
        check_executed(Said(mask, means), q_len, k_len)
