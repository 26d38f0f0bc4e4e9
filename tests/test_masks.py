"""Masks as values: what an expression means, which kernels execute, and what attention makes of it."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._masks.lower import lower
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


def sizes(q_len: int, k_len: int) -> dict[str, int]:
    return {"batch": BATCH, "num_heads": HEADS, "q_len": q_len, "k_len": k_len}


def check_lowered(said: Said, q_len: int, k_len: int) -> None:
    """The keywords say what the mask means."""
    options = lower(said.mask, **sizes(q_len, k_len))
    inputs = qkv(q_len, k_len)
    want = flash_ext.attention(*inputs, attn_mask=said.means)
    torch.testing.assert_close(flash_ext.attention(*inputs, **options), want)


# ---- meaning ------------------------------------------------------------------------------------------


@settings(max_examples=150, suppress_health_check=SLOW)
@given(st.data())
def test_an_expression_means_what_boolean_algebra_says(data: st.DataObject) -> None:
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(expressions(q_len, k_len))
    dense = said.mask.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS)
    assert torch.equal(dense, said.means), said.mask


@settings(max_examples=300, suppress_health_check=SLOW)
@given(st.data())
def test_kernels_execute_an_expression_or_it_is_refused(data: st.DataObject) -> None:
    """And each refusal names the way out, which exists for every expression."""
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(expressions(q_len, k_len))
    try:
        check_lowered(said, q_len, k_len)
    except Refused as refused:
        assert repr(said.mask) in str(refused)
        assert str(refused).endswith("Or spend memory on it: BlockMask.from_mask(mask, q_len, k_len).")
        blocks = masks.BlockMask.from_mask(said.mask, q_len, k_len, block_size=16)
        assert torch.equal(blocks.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS), said.means)
        check_lowered(Said(blocks, said.means), q_len, k_len)
    except ValueError as refused:
        assert "top_left" in str(refused) and q_len != k_len, refused


@settings(max_examples=300, suppress_health_check=SLOW)
@given(st.data())
def test_forms_that_kernels_have_are_executed(data: st.DataObject) -> None:
    """However they are written."""
    q_len, k_len = data.draw(on_lengths)
    said = data.draw(executable(q_len, k_len))
    assert torch.equal(said.mask.to_dense(q_len, k_len, batch=BATCH, num_heads=HEADS), said.means)
    try:
        check_lowered(said, q_len, k_len)
    except ValueError as refused:
        words = ("stands once", "may hold 2 intervals", "cut each other", "top_left", "of Chunks with other",
                 "lower bound on the right")  # fmt: skip
        assert any(word in str(refused) for word in words), refused


def turned(mask: Mask) -> Mask:
    """With the operands of every node in the opposite order."""
    if isinstance(mask, (And, Or)):
        return type(mask)(tuple(turned(part) for part in reversed(mask.masks)))
    return Not(turned(mask.mask)) if isinstance(mask, Not) else mask


@settings(max_examples=300, suppress_health_check=SLOW)
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
